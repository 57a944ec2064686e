// The page. Its address contains the current choices (state.js), which determine the whole page.

import { compare } from "./compare.js";
import { conversation } from "./conversation.js";
import { openData } from "./data.js";
import { h, number, plural } from "./dom.js";
import { keyboard } from "./keys.js";
import { left } from "./left.js";
import { onChange, read, set, state } from "./state.js";
import { Table } from "./table.js";

const POLL_MS = 1000;

const data = await openData().catch((error) =>
  fail(`The viewer does not answer (${error.message}). Is view.py still running?`),
);
const tables = data.runs.map(() => new Table());
const find = left({ open: (row) => open(run(), row) });
const middle = conversation();
const beside = compare({ data, tables, open });
let shown = ""; // the rollout in the middle column
let asked = 0;

document.getElementById("left").append(find.element);
document.getElementById("middle").append(middle.element);
document.getElementById("right").append(beside.element);

function fail(sentence) {
  document.getElementById("middle").append(h("p", { class: "empty" }, sentence));
  throw new Error(sentence);
}

function run() {
  return Math.max(0, data.runs.indexOf(state.run));
}

function opened() {
  return state.open ? tables[run()].rowAt(state.open) : -1;
}

function open(number_, row) {
  const table = tables[number_];
  const changes = { open: table.address(row) };
  if (number_ !== run()) changes.run = number_ ? data.runs[number_] : "";
  const source = table.columns.source[row];
  if (source !== state.source) Object.assign(changes, { source, ranges: {} });
  set(changes, { kept: false });
  find.list.reveal();
}

async function load(number_) {
  const table = tables[number_];
  return table.add(await data.table(number_, table.next(), table.generation));
}

let drawnTop = "";
function drawTop() {
  const facts = tables[run()].facts;
  const now = JSON.stringify([run(), facts.going, facts.problems, tables[run()].size]);
  if (now === drawnTop) return; // redrawing would close an open menu
  drawnTop = now;
  const names = data.runs.map((name, i) =>
    h("option", { value: name, selected: i === run() }, name),
  );
  const chosen = h(
    "select",
    {
      "aria-label": "Run",
      onchange: (event) =>
        set({
          run: event.target.value === data.runs[0] ? "" : event.target.value,
          source: "",
          open: "",
          ranges: {},
        }),
    },
    names,
  );
  const status = !data.live
    ? h("span", { class: "status", title: data.note }, data.note || "exported")
    : facts.going
      ? h("span", { class: "status going" }, h("i"), "training")
      : h("span", { class: "status" }, "ended");
  const problems = facts.problems.length
    ? h(
        "details",
        { class: "problems" },
        h("summary", {}, plural(facts.problems.length, "note")),
        h(
          "ul",
          {},
          facts.problems.map((p) => h("li", {}, p)),
        ),
      )
    : null;
  document.getElementById("top").replaceChildren(
    ...[
      h("span", { class: "brand" }, "offbyone"),
      data.runs.length > 1 ? chosen : h("b", { class: "runname", title: facts.path }, data.runs[0]),
      status,
      problems,
      h("span", { class: "space" }),
      h("span", { class: "total" }, `${number(tables[run()].size)} rollouts`),
      data.live
        ? h(
            "button",
            { class: "quiet", title: "one file that opens anywhere (e)", onclick: exportPage },
            "Export",
          )
        : null,
      h(
        "button",
        {
          class: "quiet",
          title: "keys (?)",
          onclick: () => document.getElementById("help").showModal(),
        },
        "Keys ?",
      ),
    ].filter(Boolean),
  );
  document.title = `${data.runs[run()]} · offbyone`;
}

function drawLeft(only = null) {
  const table = tables[run()];
  table.source = state.source;
  table.filter(state, only);
  find.update(table, opened());
}

async function drawMiddle() {
  const table = tables[run()],
    row = opened();
  const wanted = row < 0 ? "" : `${run()} ${state.open} ${table.generation}`;
  if (wanted && wanted === shown) return;
  shown = wanted;
  const mine = ++asked;
  if (row < 0)
    return middle.empty(
      state.open
        ? "This rollout does not exist. A resumed run may have repeated its step."
        : table.size
          ? "Nothing is open. Choose a dot on the left, or press j."
          : "",
    );
  const [[line], answer] = await Promise.all([
    data.rollouts(run(), [row]),
    data.tokens(run(), row),
  ]).catch((error) => {
    shown = ""; // so that opening the rollout again repeats the request
    throw error;
  });
  if (mine !== asked) return;
  middle.show(line, answer, table, row);
}

// Request the numbers of the rollouts that contain the searched text.
async function ask() {
  const table = tables[run()];
  table.found = state.q ? new Set(await data.search(run(), state.q)) : null;
}

// Make default choices if the address has none: training rollouts if there are any, and the first
// question with a rollout that passes the filters, if possible one with recorded tokens.
function choose() {
  const table = tables[run()];
  const sources = new Set(table.columns.source ?? []);
  if (!state.source)
    state.source = sources.has("training") || !sources.size ? "training" : "evaluation";
  if (!state.open && table.size) {
    table.source = state.source;
    table.filter(state);
    const groups = table.matching();
    const recorded = groups.filter((group) => table.recorded(group));
    // If all rewards of a group are equal, its tokens have no advantage and no gradient.
    const first = recorded.find((group) => table.differs(group)) ?? recorded[0] ?? groups[0];
    if (first) state.open = table.address(first.start);
  }
}

async function exportPage() {
  const table = tables[run()];
  const numbers = [];
  for (const group of table.matching())
    for (let row = group.start; row < group.end; row++) numbers.push(row);
  say("Writing…");
  const blob = await data.exported({ run: run(), n: numbers }).catch((error) => say(error.message));
  if (!blob) return;
  const link = h("a", { href: URL.createObjectURL(blob), download: `${data.runs[run()]}.html` });
  link.click();
  URL.revokeObjectURL(link.href);
  say(`${number(numbers.length)} rollouts are in ${link.download}.`);
}

let saying = 0;
function say(sentence) {
  document.querySelector(".toast")?.remove();
  document.body.append(h("div", { class: "toast", role: "status" }, sentence));
  clearTimeout(saying);
  saying = setTimeout(() => document.querySelector(".toast")?.remove(), 4000);
}

async function changed(names) {
  if (names.includes("run")) {
    await load(run());
  }
  if (!state.open) choose();
  if (["run", "q"].some((name) => names.includes(name))) await ask();
  if (
    names.some((name) =>
      ["run", "q", "source", "ranges", "env", "stop", "used"].includes(name),
    )
  ) {
    drawTop();
    drawLeft();
  } else if (names.includes("open")) find.list.update(tables[run()], opened());
  if (names.includes("open") || names.includes("run") || names.includes("source")) {
    await Promise.all([drawMiddle(), beside.show(run(), opened())]);
  } else {
    if (["colour", "update", "raw"].some((name) => names.includes(name))) middle.redraw();
    if (names.includes("compare")) await beside.show(run(), opened());
  }
}

// Add the rows that were written since the last poll, without scrolling anything.
async function poll() {
  if (document.hidden) return;
  try {
    const row = state.open,
      news = await load(run());
    document.body.classList.remove("lost");
    if (!news) return drawTop();
    if (!row) choose();
    if (state.q) await ask();
    drawTop();
    drawLeft();
    await Promise.all([drawMiddle(), row ? null : beside.show(run(), opened())]);
  } catch {
    document.body.classList.add("lost"); // the program has ended; the page stays readable
  }
}

function move(next, by) {
  const row = next(by, opened());
  if (row !== null) open(run(), row);
}

read();
await Promise.all([load(run()).catch((error) => fail(error.message))]);
await ask().catch((error) => fail(error.message));
choose();
drawTop();
drawLeft();
find.list.reveal();
const unanswered = (error) => say(`view.py does not answer: ${error.message}`);
onChange((names) => changed(names).catch(unanswered));
await Promise.all([drawMiddle(), beside.show(run(), opened())]).catch(unanswered);
keyboard({
  j: () => move(find.list.neighbour, 1),
  k: () => move(find.list.neighbour, -1),
  J: () => move(find.list.nextQuestion, 1),
  K: () => move(find.list.nextQuestion, -1),
  "[": () => find.step(-1),
  "]": () => find.step(1),
  ...Object.fromEntries(
    [0, 1, 2, 3, 4, 5, 6].map((i) => [String(i), () => set({ colour: String(i) })]),
  ),
  u: () => middle.nextUpdate(),
  t: () => set({ raw: state.raw ? "" : "1" }),
  g: () => set({ compare: "group" }),
  v: () => set({ compare: "versions" }),
  r: () => set({ compare: "runs" }),
  "/": () => find.focusSearch(),
  f: () => middle.fold(),
  e: () => (data.live ? exportPage() : say("This page is an export already.")),
});
document.body.classList.add("ready");
await Promise.all(tables.map((table, i) => (table.size || i === run() ? null : load(i))));
if (tables.length > 1 && state.compare === "runs") await beside.show(run(), opened());
if (data.live) setInterval(poll, POLL_MS);
