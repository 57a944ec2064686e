// The heading of a conversation: its reward and the facts of its line.

import { rewardStyle } from "./colours.js";
import { h, number, signed } from "./dom.js";

export function heading(line, table, row) {
  const group = table.groups[table.groupOf[row]];
  const evaluation = line.source === "evaluation";
  const rewards = Object.entries(line.rewards ?? {});
  const facts = [
    [evaluation ? "version" : "step", line.step < 0 ? null : number(line.step)],
    ["rollout", `${row - group.start + 1} of ${group.end - group.start}`],
    [
      "advantage",
      evaluation
        ? null
        : lineAdvantages(line)
            .map((a) => signed(a, 3))
            .join(", ") || null,
    ],
    ["tokens", number(line.tokens)],
    ["turns", number(line.turns)],
    ["ended by", line.stop_reason],
    ["sampled by", line.versions?.length ? `version ${line.versions.join(", ")}` : null],
    ["example", `${line.env} ${line.example}`],
  ];
  const state = evaluation ? "evaluated" : line.used === false ? "not trained on" : "trained on";
  return [
    h(
      "div",
      { class: "score" },
      h("i", { class: "dot", style: rewardStyle(line.reward, table) }),
      h("strong", {}, number(line.reward, 3)),
      h("span", {}, "reward"),
      rewards.length > 1 || rewards[0]?.[1] !== line.reward
        ? h(
            "span",
            { class: "parts" },
            rewards.map(([name, value]) => h("span", {}, `${name} `, h("b", {}, number(value, 3)))),
          )
        : null,
      h("span", { class: `badge ${line.used === false ? "unused" : ""}` }, state),
    ),
    h(
      "dl",
      {},
      facts
        .filter(([, value]) => value !== null)
        .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
    ),
    line.expected ? h("p", { class: "expected" }, `expected: ${line.expected}`) : null,
    line.error ? h("p", { class: "error" }, line.error) : null,
  ].filter(Boolean);
}

// Return one advantage for the whole rollout, or one for each turn.
export function lineAdvantages(line) {
  if (line.advantage === undefined || line.advantage === null) return [];
  return Array.isArray(line.advantage) ? line.advantage : [line.advantage];
}
