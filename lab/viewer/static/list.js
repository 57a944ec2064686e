// The list of questions that pass the filters, with a dot for every rollout. Only visible rows are in
// the document, so 10,000 rows cost as much as ten.

import { h, number, stepLabel } from "./dom.js";
import { rewardStyle } from "./colours.js";

const ROW = 54,
  SPARE = 8;
const RECORDED = "the tokens of this group are recorded (colours 2 to 6, raw tokens)";

export function list({ open }) {
  const room = h("div", { class: "room" });
  const element = h(
    "div",
    { id: "list", role: "listbox", tabindex: 0, "aria-label": "Questions" },
    room,
  );
  let table = null,
    groups = [],
    opened = -1,
    drawn = "";

  element.addEventListener("scroll", () => draw(), { passive: true });
  new ResizeObserver(() => draw()).observe(element);
  room.addEventListener("click", (event) => {
    const dot = event.target.closest("[data-row]");
    if (dot) return open(Number(dot.dataset.row));
    const row = event.target.closest("[data-group]");
    if (row) open(first(groups[Number(row.dataset.group)]));
  });

  function first(group) {
    for (let row = group.start; row < group.end; row++) if (table.passes(row)) return row;
    return group.start;
  }

  function update(newTable, row) {
    table = newTable;
    opened = row;
    groups = table.matching();
    room.style.height = `${groups.length * ROW}px`;
    drawn = "";
    draw();
  }

  function draw() {
    if (!table) return;
    const from = Math.max(0, Math.floor(element.scrollTop / ROW) - SPARE);
    const to = Math.min(
      groups.length,
      Math.ceil((element.scrollTop + element.clientHeight) / ROW) + SPARE,
    );
    const key = `${from} ${to}`;
    if (key === drawn) return;
    drawn = key;
    const rows = [];
    for (let i = from; i < to; i++) rows.push(question(groups[i], i));
    room.replaceChildren(...rows);
  }

  function question(group, i) {
    const { reward, question: keys, used } = table.columns;
    const dots = [];
    let sum = 0,
      count = 0;
    for (let row = group.start; row < group.end; row++) {
      if (reward[row] !== null) {
        sum += reward[row];
        count++;
      }
      const kind = [
        "dot",
        row === opened && "open",
        !table.passes(row) && "faint",
        !used[row] && "unused",
        reward[row] === null && "unscored",
      ];
      dots.push(
        h("i", {
          class: kind.filter(Boolean).join(" "),
          "data-row": row,
          style: rewardStyle(reward[row], table),
        }),
      );
    }
    const inside = opened >= group.start && opened < group.end;
    return h(
      "div",
      {
        class: inside ? "question open" : "question",
        "data-group": i,
        role: "option",
        "aria-selected": String(inside),
        style: { transform: `translateY(${i * ROW}px)` },
      },
      h("div", { class: "title" }, table.titles[keys[group.start]] || "(no question)"),
      h("div", { class: "dots" }, dots),
      h(
        "div",
        { class: "place" },
        table.recorded(group) ? h("i", { title: RECORDED }, "tokens · ") : null,
        stepLabel(group),
      ),
      h("div", { class: "mean" }, number(count ? sum / count : null, 2)),
    );
  }

  // Return the rollout `by` places after `from` among the rollouts that pass, or null if there is none.
  function neighbour(by, from) {
    const passing = [];
    for (const group of groups) {
      for (let row = group.start; row < group.end; row++) if (table.passes(row)) passing.push(row);
    }
    const at = passing.indexOf(from);
    return (at < 0 ? passing[0] : passing[at + by]) ?? null;
  }

  function nextQuestion(by, from) {
    const at = groups.findIndex((group) => from >= group.start && from < group.end);
    const group = at < 0 ? groups[0] : groups[at + by];
    return group ? first(group) : null;
  }

  function reveal() {
    const at = groups.findIndex((group) => opened >= group.start && opened < group.end);
    if (at < 0) return;
    const top = at * ROW;
    if (top < element.scrollTop) element.scrollTop = top;
    if (top + ROW > element.scrollTop + element.clientHeight)
      element.scrollTop = top + ROW - element.clientHeight;
  }

  return { element, update, neighbour, nextQuestion, reveal, size: () => groups.length };
}
