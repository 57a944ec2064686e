// The left column: reward curve, histograms, other filters, search, and the list of questions.

import { h, number, plural } from "./dom.js";
import { curve } from "./curve.js";
import { histogram } from "./histogram.js";
import { list } from "./list.js";
import { set, state } from "./state.js";

const HISTOGRAMS = [
  ["reward", "reward", "reward of the environment"],
  ["advantage", "advantage", "better or worse than the group; mean if each turn has an advantage"],
  ["length", "tokens", "tokens that the policy sampled"],
  ["turns", "turns", "turns of the policy"],
  ["staleness", "staleness", "number of versions by which the oldest token was behind"],
  ["push", "Σ |grad|", "how much the rollout moved the policy: the sum of |grad| over its tokens"],
];
const SOURCES = [
  ["training", "Training"],
  ["evaluation", "Evaluations"],
];

export function left({ open, search }) {
  const steps = curve();
  const histograms = HISTOGRAMS.map(([name, label, hint]) => [name, histogram(name, label, hint)]);
  const questions = list({ open });
  const box = h("input", {
    type: "search",
    id: "search",
    placeholder: "Search the messages",
    "aria-label": "Search the messages",
    autocomplete: "off",
    spellcheck: "false",
  });
  const sources = h("div", { class: "segments sources", role: "tablist" });
  const choices = h("div", { class: "choices" });
  const count = h("div", { class: "count" });
  const empty = h("div", { class: "empty", hidden: true });
  const element = h(
    "div",
    { class: "find" },
    h(
      "div",
      { class: "filters" },
      sources,
      steps.element,
      h(
        "div",
        { class: "histograms" },
        histograms.map(([, one]) => one.element),
      ),
      choices,
    ),
    h("div", { class: "searchbar" }, box, h("kbd", {}, "/")),
    count,
    questions.element,
    empty,
  );

  let waiting = 0;
  box.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => set({ q: box.value.trim() }), 120);
  });

  function update(table, row) {
    sources.replaceChildren(
      ...SOURCES.map(([name, label]) =>
        h(
          "button",
          {
            role: "tab",
            class: state.source === name ? "on" : "",
            "aria-selected": String(state.source === name),
            "data-source": name,
            onclick: () => set({ source: name, ranges: {}, open: "" }),
          },
          label,
        ),
      ),
    );
    steps.update(table);
    for (const [name, one] of histograms) {
      one.element.hidden =
        state.source === "evaluation" && ["advantage", "staleness", "push"].includes(name);
      one.update(table);
    }
    drawChoices(table);
    if (document.activeElement !== box) box.value = state.q;
    questions.update(table, row);
    drawCount(table);
  }

  function drawChoices(table) {
    const rows = [
      choice(table, "env", "environment"),
      choice(table, "stop", "ended by"),
      used(table),
    ];
    choices.replaceChildren(...rows.filter(Boolean));
  }

  function choice(table, name, label) {
    const values = table.values(name);
    if (values.length < 2 && !state[name]) return null;
    const chosen = new Set(state[name] ? state[name].split(",") : []);
    const buttons = values.map(([value, n]) =>
      h(
        "button",
        {
          class: chosen.has(value) ? "chip on" : "chip",
          "aria-pressed": String(chosen.has(value)),
          "data-choice": `${name}=${value}`,
          onclick: () => set({ [name]: toggled(chosen, value) }),
        },
        value || "none",
        h("span", {}, number(n)),
      ),
    );
    return h("div", { class: "choice" }, h("span", { class: "label" }, label), buttons);
  }

  function used(table) {
    const values = new Map(table.values("used"));
    if (values.size < 2 && !state.used) return null;
    const buttons = [
      ["true", "yes"],
      ["false", "no"],
    ].map(([value, label]) =>
      h(
        "button",
        {
          class: state.used === value ? "chip on" : "chip",
          "aria-pressed": String(state.used === value),
          "data-choice": `used=${value}`,
          onclick: () => set({ used: state.used === value ? "" : value }),
        },
        label,
        h("span", {}, number(values.get(value === "true") ?? 0)),
      ),
    );
    return h("div", { class: "choice" }, h("span", { class: "label" }, "trained on"), buttons);
  }

  function drawCount(table) {
    const filters = numFilters();
    const clear = filters
      ? h("button", { class: "clear-all", onclick: clearAll }, `remove ${plural(filters, "filter")}`)
      : null;
    count.replaceChildren(
      h("span", {}, plural(questions.size(), "question")),
      ...(clear ? [clear] : []),
    );
    const nothing = questions.size() === 0;
    questions.element.hidden = nothing;
    empty.hidden = !nothing;
    if (nothing) empty.replaceChildren(h("p", {}, why(table, filters)));
  }

  function why(table, filters) {
    if (!table.size) {
      return table.facts?.going
        ? "No rollouts yet: the first step has not been written. Rollouts will appear automatically."
        : "This run has no rollouts: it ended before its first step. The files in its folder logs/ say why.";
    }
    const here = table.groups.some((group) => group.source === state.source);
    if (!here && state.source === "evaluation")
      return "This run was not evaluated. Train with evaluation=default to see the same held-out questions at several versions.";
    if (!here) return "There are no training rollouts here: this is an evaluation.";
    return `No rollout passes ${filters === 1 ? "this filter" : "all filters together"}.`;
  }

  function numFilters() {
    return (
      Object.keys(state.ranges).length +
      ["q", "env", "stop", "used"].filter((name) => state[name]).length
    );
  }

  function clearAll() {
    box.value = "";
    set({ ranges: {}, q: "", env: "", stop: "", used: "" });
  }

  return { element, update, step: steps.step, list: questions, focusSearch: () => box.select() };
}

function toggled(chosen, value) {
  const next = new Set(chosen);
  if (!next.delete(value)) next.add(value);
  return [...next].join(",");
}
