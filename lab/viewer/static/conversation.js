// The middle column: one rollout, as messages turn by turn or as coloured tokens.

import { COLOURS } from "./colours.js";
import { h, number, plural, signed } from "./dom.js";
import { heading, lineAdvantages } from "./heading.js";
import { said } from "./messages.js";
import { set, state } from "./state.js";
import { cardOf } from "./token_card.js";
import { shownText, tokensByTurn, tokensOf } from "./tokens.js";

export function conversation() {
  const head = h("div", { class: "head" });
  const bar = h("div", { class: "colourbar", role: "toolbar", "aria-label": "Colours" });
  const legend = h("div", { class: "legend", hidden: true });
  const body = h("div", { class: "body" });
  const element = h("div", { class: "conversation" }, head, bar, legend, body);
  let line = null,
    answer = null,
    table = null,
    rows = [], // the token rows of the chosen update
    updates = 1,
    spans = [],
    scales = {};
  cardOf(
    body,
    (span) => (span ? spans[Number(span.dataset.token)] : null),
    () => line.step,
  );

  function show(newLine, newAnswer, newTable, row) {
    line = newLine;
    answer = newAnswer;
    table = newTable;
    const grad = table.facts.scales[String(line.step)] ?? 1;
    const advantages = answer.rows.flatMap((r) => r.advantage ?? []).filter((x) => x !== null);
    scales = {
      grad,
      step: line.step,
      advantage: [...advantages, ...lineAdvantages(line)].reduce(larger, 1e-9),
    };
    head.replaceChildren(...heading(line, table, row));
    redraw();
  }

  function redraw() {
    if (!line) return;
    spans = [];
    updates = answer.rows.reduce((most, row) => Math.max(most, row.update + 1), 1);
    rows = answer.rows.filter((row) => row.update === chosenUpdate() || !row.grad);
    const colour = COLOURS[Number(state.colour)] ?? COLOURS[0];
    drawBar(colour);
    drawLegend(colour, why(colour));
    body.className = `body colour-${colour.name}`;
    body.replaceChildren(...(state.raw ? rawRows() : turns(colour)));
    paint(colour);
  }

  function chosenUpdate() {
    return Math.min(Number(state.update), updates - 1);
  }

  function nextUpdate() {
    if (updates > 1) set({ update: String((chosenUpdate() + 1) % updates) });
  }

  function drawBar(colour) {
    const buttons = COLOURS.map((c, i) =>
      h(
        "button",
        {
          class: c === colour ? "on" : "",
          "aria-pressed": String(c === colour),
          "data-colour": i,
          title: `${c.means} (${i})`,
          onclick: () => set({ colour: String(i) }),
        },
        h("kbd", {}, String(i)),
        c.name,
      ),
    );
    const raw = h(
      "button",
      {
        class: state.raw ? "on raw" : "raw",
        "aria-pressed": String(Boolean(state.raw)),
        title: "every token that the server saw (t)",
        onclick: () => set({ raw: state.raw ? "" : "1" }),
      },
      h("kbd", {}, "t"),
      "raw tokens",
    );
    const update = h(
      "button",
      { class: "raw update", title: "next update of the batch (u)", onclick: nextUpdate },
      h("kbd", {}, "u"),
      `update ${chosenUpdate() + 1} of ${updates}`,
    );
    bar.replaceChildren(
      ...[h("div", { class: "segments" }, buttons), updates > 1 && update, raw].filter(Boolean),
    );
  }

  function drawLegend(colour, missing) {
    legend.hidden = !missing && !colour.ends;
    const sentence = h("p", { class: missing ? "says missing" : "says" }, missing || colour.means);
    if (missing || !colour.ends) return legend.replaceChildren(sentence);
    const [from, to] = colour.scale.map((name) =>
      name ? `color-mix(in srgb, var(--${name}) 62%, transparent)` : "transparent",
    );
    const middle = colour.scale[0] ? "transparent, " : "";
    const ramp = h("i", {
      class: "ramp",
      style: { background: `linear-gradient(90deg, ${from}, ${middle}${to})` },
    });
    const [low, high] = colour.ends.map((end) => h("span", { class: "end" }, end));
    legend.replaceChildren(sentence, low, ramp, high);
  }

  // Return why a colour, or the raw view, shows nothing for this rollout.
  function why(colour) {
    if (rows.length) {
      const absent =
        colour.reads && !rows.some((row) => row[colour.reads]?.some((x) => x !== null));
      if (absent)
        return `no token here has ${article(colour.name)}: ${answer.why || "this run recorded none"}`;
      return answer.why && (colour.reads || state.raw) ? answer.why : "";
    }
    const others = table.groups.some((g) => g.source === state.source && table.recorded(g));
    const hint = others ? "; questions marked “tokens” on the left have a record" : "";
    if (state.raw) return `no tokens to show: ${answer.why}${hint}`;
    if (colour.name === "advantage" && lineAdvantages(line).length) return "";
    return colour.reads ? `${colour.name} needs tokens: ${answer.why}${hint}` : "";
  }

  function turns(colour) {
    const assistants = line.messages.filter((m) => m?.role === "assistant").length;
    let turn = line.turns - assistants; // examples in the prompt come before the first turn
    const byTurn = rows.length ? tokensByTurn(rows) : null;
    return line.messages.map((message) => {
      if (message?.role !== "assistant")
        return block(message?.role ?? "other", null, said(message));
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
          margin.push(
            h(
              "div",
              {
                class: values[turn] > 0 ? "earned" : "earned nothing",
                title: `reward ${name} of this turn`,
              },
              `${name} ${signed(values[turn])}`,
            ),
          );
        }
      }
      const advantages = lineAdvantages(line);
      if (advantages.length > 1)
        margin.push(
          h(
            "div",
            { class: "earned nothing", title: "advantage of this turn" },
            `A ${signed(advantages[turn])}`,
          ),
        );
    }
    return h(
      "section",
      { class: `message ${role}` },
      h("div", { class: "margin" }, margin),
      h("div", { class: "said" }, content),
    );
  }

  function stream(tokens) {
    const element = h("div", { class: "stream" });
    let thinking = false,
      calling = false;
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
    const classes = [
      "token",
      token.special && "special",
      token.sampled ? "" : "given",
      ...kinds,
    ].filter(Boolean);
    spans.push(token);
    return h(
      "span",
      { class: classes.join(" "), "data-token": spans.length - 1 },
      shownText(token),
    );
  }

  function rawRows() {
    return rows.map((row) => {
      const tokens = tokensOf(row);
      const sampled = tokens.filter((token) => token.sampled).length;
      const title = `row ${row.row} · ${plural(tokens.length, "token")}, ${number(sampled)} sampled`;
      const fork = row.row > 0 ? " · a fork: the prompt did not extend the row before" : "";
      return h(
        "section",
        { class: "rawrow" },
        h("h4", {}, title + fork),
        h(
          "div",
          { class: "stream" },
          tokens.map((token) => span(token, [])),
        ),
      );
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

  return { element, show, redraw, nextUpdate, fold, empty };
}

function article(name) {
  return /^[aeiou]/.test(name) ? `an ${name}` : `a ${name}`;
}

// Math.max(...values) fails for long rollouts: a function takes about 10^5 arguments at most.
function larger(most, value) {
  return Math.max(most, Math.abs(value));
}
