// The card with the numbers of the token under the pointer.

import { h, number, signed } from "./dom.js";

const FIELDS = [
  ["log π", "pi", "logprob of the policy in training"],
  ["log μ", "mu", "logprob of the server when it sampled"],
  ["log old", "old"],
  ["log ref", "ref"],
  ["ratio", "ratio"],
  ["mismatch", "mismatch"],
  ["entropy", "entropy"],
  ["version", "version"],
  ["advantage", "advantage"],
  ["weight", "weight"],
  ["correction", "correction"],
  ["grad", "grad"],
];

export function cardOf(body, tokenAt, stepNow) {
  const card = document.getElementById("card");
  let current = null;
  body.addEventListener("pointermove", (event) => {
    const span = event.target.closest?.("[data-token]");
    const token = tokenAt(span);
    if (token !== current) {
      current = token;
      card.hidden = !token;
      if (token) card.replaceChildren(...about(token, stepNow()));
    }
    if (token) place(card, span.getBoundingClientRect());
  });
  const hide = () => {
    current = null;
    card.hidden = true;
  };
  body.addEventListener("pointerleave", hide);
  window.addEventListener("scroll", hide, { capture: true, passive: true });
  window.addEventListener("keydown", hide);
}

function about(token, step) {
  const title = h(
    "div",
    { class: "tokentitle" },
    h("code", {}, JSON.stringify(token.piece)),
    h("span", {}, `token ${token.id}`),
  );
  const rows = FIELDS.filter(([, name]) => token[name] !== null && token[name] !== undefined).map(
    ([label, name]) =>
      h(
        "div",
        {},
        h("dt", {}, label),
        h(
          "dd",
          {},
          name === "version" || name === "ratio" || name === "entropy" || name === "weight"
            ? number(token[name], 4)
            : signed(token[name], 4),
        ),
      ),
  );
  const behind = token.version === null ? 0 : step - token.version;
  const metrics = Object.entries(token.metrics);
  const parts = [title];
  if (!token.sampled) parts.push(h("p", {}, "given, not sampled: no gradient"));
  else parts.push(h("dl", {}, rows));
  if (metrics.length)
    parts.push(
      h(
        "p",
        { class: "flags" },
        metrics
          .map(([name, value]) => `${name} ${number(value)}`)
          .join(" · "),
      ),
    );
  if (behind > 0 && token.mismatch !== null)
    parts.push(
      h(
        "p",
        {},
        `Its version is ${behind} behind, so the mismatch includes the policy's change since then.`,
      ),
    );
  if (token.reason) parts.push(h("p", { class: "reason" }, `No gradient: ${token.reason}.`));
  else if (token.grad)
    parts.push(
      h(
        "p",
        { class: "effect" },
        token.grad < 0 ? "Training made it more probable." : "Training made it less probable.",
      ),
    );
  return parts;
}

function place(card, box) {
  const { offsetWidth: width, offsetHeight: height } = card;
  const left = Math.min(Math.max(8, box.left), innerWidth - width - 8);
  const below = box.bottom + 8 + height < innerHeight;
  card.style.left = `${left}px`;
  card.style.top = `${below ? box.bottom + 8 : Math.max(8, box.top - height - 8)}px`;
}
