// The keyboard shortcuts and their help page.

import { h } from "./dom.js";

const HELP = [
  ["j  k", "next, previous rollout"],
  ["J  K", "next, previous question"],
  ["[  ]", "previous, next step"],
  ["0 – 6", "colours: plain, advantage, ratio, entropy, version, mismatch, grad"],
  ["u", "next update of the batch, with updates_per_batch above 1"],
  ["t", "raw tokens, as the server saw them"],
  ["g  v  r", "compare: group, versions, other runs"],
  ["f", "fold and unfold calls, answers, instructions"],
  ["/", "search"],
  ["e", "export the questions that pass the filters as one file"],
  ["Esc", "leave the search"],
  ["?", "show or hide this list"],
];

export function keyboard(actions) {
  const help = document.getElementById("help");
  help.append(
    h("h2", {}, "Keys"),
    h(
      "dl",
      {},
      HELP.map(([keys, does]) => h("div", {}, h("dt", {}, h("kbd", {}, keys)), h("dd", {}, does))),
    ),
  );
  help.addEventListener("click", () => help.close());

  window.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.matches("input, textarea, select")) {
      if (event.key === "Escape" || event.key === "Enter") event.target.blur();
      return;
    }
    if (event.key === "?") {
      if (help.open) help.close();
      else help.showModal();
      return;
    }
    if (help.open) return;
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
}
