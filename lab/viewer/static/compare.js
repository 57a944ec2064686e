// The right column: the other rollouts of the group, the same question at other versions, and in
// other runs.
//
// Equal answers are shown once, with a dot for each rollout. If an answer begins like the open
// rollout, this beginning is dimmed, so that the difference is easy to see.

import { h, number, plural, svg } from "./dom.js";
import { answerText } from "./messages.js";
import { SECTIONS } from "./sections.js";
import { rewardEnds, rewardStyle } from "./colours.js";
import { set, state } from "./state.js";

const TABS = [
  ["group", "g", "Group"],
  ["versions", "v", "Over versions"],
  ["runs", "r", "Other runs"],
];
const MOST = 400; // rollouts to show in all sections together, but at least 4 in each section
const SHARED = 60; // maximum characters of shared text to show

export function compare({ data, tables, open }) {
  const tabs = h("div", { class: "tabs", role: "tablist" });
  const body = h("div", { class: "answers" });
  const element = h("div", { class: "compare" }, tabs, body);
  let turn = 0; // number of the latest call of `show`; an earlier call draws nothing

  async function show(run, row) {
    const mine = ++turn;
    tabs.replaceChildren(
      ...TABS.map(([name, key, label]) =>
        h(
          "button",
          {
            role: "tab",
            "aria-selected": String(state.compare === name),
            class: state.compare === name ? "on" : "",
            "data-tab": name,
            onclick: () => set({ compare: name }),
          },
          label,
          h("kbd", {}, key),
        ),
      ),
    );
    if (row < 0)
      return body.replaceChildren(h("p", { class: "empty" }, "Open a rollout to compare it."));
    const sections = SECTIONS[state.compare](tables, run, row);
    if (typeof sections === "string")
      return body.replaceChildren(h("p", { class: "empty" }, sections));
    const left = MOST / Math.max(1, sections.length);
    const fetched = await Promise.all(
      sections.map((section) =>
        data.rollouts(section.run, section.rows.slice(0, Math.max(4, left))),
      ),
    );
    const [current] = await data.rollouts(run, [row]);
    if (mine !== turn) return;
    const opened = answerText(current);
    const parts = sections.map((section, i) => drawn(section, fetched[i], opened, { run, row }));
    const chart = state.compare === "group" ? [] : [means(sections, tables)];
    const top = body.scrollTop;
    body.replaceChildren(...chart, ...parts);
    body.scrollTop = top;
  }

  function drawn(section, lines, opened, current) {
    const table = tables[section.run];
    const answers = new Map();
    lines.forEach((line, i) => {
      const text = answerText(line);
      if (!answers.has(text)) answers.set(text, []);
      answers.get(text).push({ line, row: section.rows[i] });
    });
    const isHere = (rollouts) =>
      section.run === current.run && rollouts.some((r) => r.row === current.row);
    const ordered = [...answers].sort(
      (a, b) => isHere(b[1]) - isHere(a[1]) || best(b[1]) - best(a[1]) || b[1].length - a[1].length,
    );
    const cards = ordered.map(([text, rollouts]) => {
      const here = isHere(rollouts);
      const dots = rollouts.map((r) => {
        const isOpen = r.row === current.row && section.run === current.run;
        return h("i", {
          class: isOpen ? "dot open" : "dot",
          style: rewardStyle(r.line.reward, table),
          "data-row": r.row,
          title: `reward ${number(r.line.reward)}`,
          onclick: (event) => {
            event.stopPropagation();
            open(section.run, r.row);
          },
        });
      });
      const count =
        rollouts.length > 1 ? h("span", { class: "count" }, `× ${rollouts.length}`) : null;
      return h(
        "div",
        {
          class: here ? "answer open" : "answer",
          onclick: () => here || open(section.run, rollouts[0].row),
        },
        h(
          "div",
          { class: "answerhead" },
          h("span", { class: "dots" }, dots),
          count,
          h("span", { class: "reward" }, number(rollouts[0].line.reward, 2)),
        ),
        here ? h("p", { class: "text" }, text || "(nothing)") : parted(text, opened),
      );
    });
    const rewards = section.rows.map((row) => table.columns.reward[row]).filter((x) => x !== null);
    const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
    const more = section.rows.length > lines.length ? `, ${lines.length} of them here` : "";
    return h(
      "section",
      {},
      h(
        "h3",
        {},
        h("span", {}, section.title),
        h(
          "span",
          { class: "sum" },
          `mean ${number(mean, 2)} · ${plural(answers.size, "answer")} of ${section.rows.length}${more}`,
        ),
      ),
      cards,
    );
  }

  return { element, show };
}

function best(rollouts) {
  return rollouts[0].line.reward ?? -Infinity;
}

// Return the mean reward of each section as a row of bars.
function means(sections, tables) {
  const bars = sections.map((section) => {
    const rewards = section.rows
      .map((row) => tables[section.run].columns.reward[row])
      .filter((x) => x !== null);
    return rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : 0;
  });
  const most = Math.max(
    ...bars,
    ...sections.map((section) => rewardEnds(tables[section.run])[1]),
    1e-9,
  );
  const picture = svg("svg", {
    class: "means",
    viewBox: `0 0 ${Math.max(bars.length, 6)} 30`,
    preserveAspectRatio: "none",
  });
  bars.forEach((mean, i) => {
    const height = Math.max(1, (28 * Math.max(0, mean)) / most);
    picture.append(
      svg(
        "rect",
        { x: i + 0.15, width: 0.7, y: 30 - height, height },
        svg("title", {}, `${sections[i].title}: ${number(mean, 2)}`),
      ),
    );
  });
  return h("figure", { class: "overview" }, picture);
}

// Return the answer. Dim the beginning that it shares with the open rollout.
function parted(text, opened) {
  let at = 0;
  while (at < text.length && at < opened.length && text[at] === opened[at]) at++;
  if (at === text.length && at === opened.length) return h("p", { class: "text same" }, text);
  const shared = text.slice(0, at),
    rest = text.slice(at);
  const [word] = /^\s*[\p{L}\p{N}]*[^\p{L}\p{N}\s]*/u.exec(rest);
  return h(
    "p",
    { class: "text" },
    h(
      "span",
      { class: "shared", title: "the same as in the open rollout" },
      shared.length > SHARED ? "… " + shared.slice(-SHARED).replace(/^\S*\s/, "") : shared,
    ),
    h(at ? "mark" : "span", {}, word || (rest ? rest[0] : "⏹ ends here")),
    rest.slice(word.length || (rest ? 1 : 0)),
  );
}
