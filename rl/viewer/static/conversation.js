// One rollout: what was said turn by turn, or the tokens that the server saw, coloured.

import { h, number, plural, signed } from "./dom.js";
import { COLOURS, rewardStyle } from "./colours.js";
import { set, state } from "./state.js";
import { cardOf } from "./token_card.js";

const LONG = { tool: 700, system: 160 }; // characters from which a message begins folded

export function conversation() {
  const head = h("div", { class: "head" });
  const bar = h("div", { class: "colourbar", role: "toolbar", "aria-label": "Colours" });
  const legend = h("div", { class: "legend", hidden: true });
  const body = h("div", { class: "body" });
  const element = h("div", { class: "conversation" }, head, bar, legend, body);
  let line = null, answer = null, spans = [], scales = {};
  cardOf(body, (span) => (span ? spans[Number(span.dataset.token)] : null), () => line.step);

  function show(newLine, newAnswer, table, row) {
    line = newLine;
    answer = newAnswer;
    const slope = table.facts.scales[String(line.step)] ?? 1;
    const advantages = answer.rows.flatMap((r) => r.advantage ?? []).filter((x) => x !== null).map(Math.abs);
    scales = { slope, step: line.step, advantage: Math.max(...advantages, ...lineAdvantages(line).map(Math.abs), 1e-9) };
    head.replaceChildren(...heading(line, table, row));
    redraw();
  }

  function redraw() {
    if (!line) return;
    spans = [];
    const colour = COLOURS[Number(state.colour)] ?? COLOURS[0];
    drawBar(colour);
    drawLegend(colour, why(colour));
    body.className = `body colour-${colour.name}`;
    body.replaceChildren(...(state.raw ? rawRows() : turns(colour)));
    paint(colour);
  }

  function drawBar(colour) {
    const buttons = COLOURS.map((c, i) =>
      h(
        "button", {
          class: c === colour ? "on" : "", "aria-pressed": String(c === colour), "data-colour": i,
          title: `${c.means} (${i})`, onclick: () => set({ colour: String(i) }),
        },
        h("kbd", {}, String(i)), c.name,
      ),
    );
    const raw = h(
      "button", { class: state.raw ? "on raw" : "raw", "aria-pressed": String(Boolean(state.raw)),
        title: "every token that the server saw (t)", onclick: () => set({ raw: state.raw ? "" : "1" }) },
      h("kbd", {}, "t"), "raw tokens",
    );
    bar.replaceChildren(h("div", { class: "segments" }, buttons), raw);
  }

  function drawLegend(colour, missing) {
    legend.hidden = !missing && !colour.ends;
    const sentence = h("p", { class: missing ? "says missing" : "says" }, missing || colour.means);
    if (missing || !colour.ends) return legend.replaceChildren(sentence);
    const [from, to] = colour.scale.map((name) => (name ? `color-mix(in srgb, var(--${name}) 62%, transparent)` : "transparent"));
    const middle = colour.scale[0] ? "transparent, " : "";
    const ramp = h("i", { class: "ramp", style: { background: `linear-gradient(90deg, ${from}, ${middle}${to})` } });
    const [low, high] = colour.ends.map((end) => h("span", { class: "end" }, end));
    legend.replaceChildren(sentence, low, ramp, high);
  }

  // Why a colour, or the raw view, shows nothing here.
  function why(colour) {
    if (answer.rows.length) {
      const absent = colour.reads && !answer.rows.some((row) => row[colour.reads]?.some((x) => x !== null));
      if (absent) return `no token here has ${article(colour.name)}: ${answer.why || "this run recorded none"}`;
      return answer.why && (colour.reads || state.raw) ? answer.why : "";
    }
    if (state.raw) return `no tokens to show: ${answer.why}`;
    if (colour.name === "advantage" && lineAdvantages(line).length) return "";
    return colour.reads ? `${colour.name} needs tokens: ${answer.why}` : "";
  }

  function turns(colour) {
    const assistants = line.messages.filter((m) => m?.role === "assistant").length;
    let turn = line.turns - assistants; // examples in the prompt come before the first turn
    const byTurn = answer.rows.length ? tokensByTurn(answer.rows) : null;
    return line.messages.map((message) => {
      if (message?.role !== "assistant") return block(message?.role ?? "other", null, said(message));
      const at = turn++;
      const tokens = colour.reads && byTurn?.get(at);
      const content = tokens ? [stream(tokens)] : said(message);
      const element = block("assistant", at >= 0 ? at : null, content);
      if (!tokens && colour.name === "advantage" && at >= 0) tintTurn(element, at);
      return element;
    });
  }

  function tintTurn(element, turn) {
    const all = lineAdvantages(line);
    const advantage = all.length > 1 ? all[turn] : all[0];
    const colour = advantage === undefined ? null : COLOURS[1].paint({ advantage }, scales);
    if (colour) element.querySelector(".said").style.background = colour;
  }

  function block(role, turn, content) {
    const margin = [h("div", { class: "role" }, turn === null ? role : `turn ${turn + 1}`)];
    if (turn !== null) {
      for (const [name, values] of Object.entries(line.turn_rewards ?? {})) {
        if (values?.[turn] !== undefined) {
          margin.push(h("div", { class: values[turn] > 0 ? "earned" : "earned nothing", title: `reward ${name} of this turn` }, `${name} ${signed(values[turn])}`));
        }
      }
      const advantages = lineAdvantages(line);
      if (advantages.length > 1) margin.push(h("div", { class: "earned nothing", title: "advantage of this turn" }, `A ${signed(advantages[turn])}`));
    }
    return h("section", { class: `message ${role}` }, h("div", { class: "margin" }, margin), h("div", { class: "said" }, content));
  }

  function stream(tokens) {
    const element = h("div", { class: "stream" });
    let thinking = false, calling = false;
    for (const token of tokens) {
      const text = token.piece.trim();
      if (text === "<think>") thinking = true;
      if (text === "<tool_call>") calling = true;
      element.append(span(token, [thinking && "thinking", calling && "calling"]));
      if (text === "</think>") thinking = false;
      if (text === "</tool_call>") calling = false;
    }
    return element;
  }

  function span(token, kinds) {
    const classes = ["token", token.special && "special", token.sampled ? "" : "given", ...kinds].filter(Boolean);
    spans.push(token);
    return h("span", { class: classes.join(" "), "data-token": spans.length - 1 }, shownText(token));
  }

  function rawRows() {
    return answer.rows.map((row) => {
      const tokens = tokensOf(row);
      const sampled = tokens.filter((token) => token.sampled).length;
      const title = `row ${row.row} · ${plural(tokens.length, "token")}, ${number(sampled)} sampled`;
      const fork = row.row > 0 ? " · a fork: the prompt did not extend the row before" : "";
      return h("section", { class: "rawrow" }, h("h4", {}, title + fork), h("div", { class: "stream" }, tokens.map((token) => span(token, []))));
    });
  }

  function paint(colour) {
    if (!colour.reads) return;
    const elements = body.querySelectorAll("[data-token]");
    for (const element of elements) {
      const token = spans[Number(element.dataset.token)];
      const value = token[colour.reads];
      if (!token.sampled || value === null || value === undefined) continue;
      const background = colour.paint(token, scales);
      if (background) element.style.background = background;
      if (colour.hatched?.(token)) element.classList.add("hatched");
    }
  }

  function fold() {
    const all = [...body.querySelectorAll("details")];
    const open = all.every((details) => !details.open);
    for (const details of all) details.open = open;
  }

  function empty(sentence) {
    line = null;
    head.replaceChildren();
    bar.replaceChildren();
    legend.hidden = true;
    body.replaceChildren(h("p", { class: "empty" }, sentence));
  }

  return { element, show, redraw, fold, empty };
}

const NUMBERS = [
  "mu", "pi", "old", "ref", "ratio", "entropy", "version", "mismatch", "correction", "advantage", "weight",
  "loss", "slope", "kept", "reason",
];

function tokensOf(row) {
  return row.ids.map((id, i) => {
    const token = { id, piece: row.pieces[i], special: row.special[i], sampled: row.mask[i], turn: row.turns[i] };
    for (const name of NUMBERS) token[name] = row[name]?.[i] ?? null;
    token.metrics = Object.fromEntries(Object.entries(row.metrics ?? {}).map(([name, values]) => [name, values[i]]));
    return token;
  });
}

function tokensByTurn(rows) {
  const turns = new Map();
  for (const token of rows.flatMap(tokensOf)) {
    if (!token.sampled) continue;
    if (!turns.has(token.turn)) turns.set(token.turn, []);
    turns.get(token.turn).push(token);
  }
  return turns;
}

function shownText(token) {
  if (token.piece === "") return "·"; // a part of a character
  return token.piece.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");
}

function heading(line, table, row) {
  const group = table.groups[table.groupOf[row]];
  const evaluation = line.source === "evaluation";
  const rewards = Object.entries(line.rewards ?? {});
  const facts = [
    [evaluation ? "version" : "step", number(line.step)],
    ["rollout", `${row - group.start + 1} of ${group.end - group.start}`],
    ["advantage", evaluation ? null : lineAdvantages(line).map((a) => signed(a, 3)).join(", ") || null],
    ["tokens", number(line.tokens)],
    ["turns", number(line.turns)],
    ["ended by", line.stop_reason],
    ["sampled by", line.versions?.length ? `version ${line.versions.join(", ")}` : null],
    ["example", `${line.env} ${line.example}`],
  ];
  const state = evaluation ? "evaluated" : line.used === false ? "not trained on" : "trained on";
  return [
    h("div", { class: "score" }, h("i", { class: "dot", style: rewardStyle(line.reward, table) }), h("strong", {}, number(line.reward, 3)),
      h("span", {}, "reward"), rewards.length > 1 || rewards[0]?.[1] !== line.reward
        ? h("span", { class: "parts" }, rewards.map(([name, value]) => h("span", {}, `${name} `, h("b", {}, number(value, 3))))) : null,
      h("span", { class: `badge ${line.used === false ? "unused" : ""}` }, state)),
    h("dl", {}, facts.filter(([, value]) => value !== null).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    line.error ? h("p", { class: "error" }, line.error) : null,
  ].filter(Boolean);
}

function lineAdvantages(line) {
  if (line.advantage === undefined || line.advantage === null) return [];
  return Array.isArray(line.advantage) ? line.advantage : [line.advantage];
}

function article(name) {
  return /^[aeiou]/.test(name) ? `an ${name}` : `a ${name}`;
}

// What a message says, as elements: thought, text, calls.
function said(message) {
  if (!message || typeof message !== "object") return [h("p", { class: "text" }, asText(message))];
  const parts = [];
  const folds = message.role === "tool" || message.role === "system";
  if (message.reasoning_content) parts.push(h("p", { class: "text thinking" }, asText(message.reasoning_content)));
  if (message.content) {
    const text = asText(message.content);
    if (folds) {
      const firstLine = text.trim().split("\n")[0].slice(0, 160);
      parts.push(folded(message.role === "tool" ? "answer" : "instructions", firstLine, text, text.length <= LONG[message.role]));
    } else parts.push(...withThoughts(text));
  }
  const calls = message.tool_calls ?? [];
  for (const call of Array.isArray(calls) ? calls : [calls]) parts.push(calling(call));
  if (!parts.length) parts.push(h("p", { class: "text nothing" }, "(nothing)"));
  return parts;
}

function withThoughts(text) {
  const match = /^\s*<think>([\s\S]*?)(<\/think>|$)/.exec(text);
  if (!match) return [h("p", { class: "text" }, text)];
  const rest = text.slice(match[0].length).trim();
  return [h("p", { class: "text thinking" }, match[1].trim()), rest ? h("p", { class: "text" }, rest) : null].filter(Boolean);
}

function folded(name, summary, text, open) {
  return h("details", { class: "fold", open }, h("summary", {}, h("b", {}, name), h("span", {}, summary)), h("p", { class: "text" }, text));
}

function calling(call) {
  const wanted = call?.function ?? {};
  const given = typeof wanted.arguments === "string" ? wanted.arguments : asText(wanted.arguments ?? call);
  const short = typeof wanted.arguments === "object" && wanted.arguments !== null
    ? Object.entries(wanted.arguments).map(([k, v]) => `${k}=${JSON.stringify(v)}`).join(", ") : given;
  const summary = h("summary", {}, h("b", {}, wanted.name || "call"), h("code", {}, `(${short})`));
  const error = call?.error ? h("p", { class: "error" }, asText(call.error)) : null;
  const whole = typeof wanted.arguments === "object" ? JSON.stringify(wanted.arguments, null, 2) : given;
  return h("details", { class: "fold call", open: Boolean(error) }, summary, h("pre", {}, whole), error);
}

export function asText(value) {
  return typeof value === "string" ? value : value === undefined ? "" : JSON.stringify(value, null, 1);
}
