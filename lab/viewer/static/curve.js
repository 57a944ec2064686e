// The curve of the mean reward. A click chooses a step, and dragging chooses several.

import { h, number, plural, stepLabel, svg } from "./dom.js";
import { brushed } from "./brush.js";
import { setRange, state } from "./state.js";

const WIDTH = 320,
  HEIGHT = 72,
  PAD = 6;

export function curve() {
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" });
  const title = h("span"),
    values = h("b");
  const clear = h(
    "button",
    { class: "clear", title: "all steps", onclick: () => setRange("step", null) },
    "×",
  );
  const low = h("span"),
    high = h("span"),
    top = h("span"),
    bottom = h("span"),
    keys = h("span");
  const element = h(
    "figure",
    { class: "curve", title: "mean reward; click a step, or drag over several" },
    h("figcaption", {}, title, values, clear),
    h("div", { class: "levels" }, top, bottom),
    picture,
    h("div", { class: "ends" }, low, keys, high),
  );
  let steps = [],
    points = [];

  brushed(picture, {
    place: (share) => {
      const at = steps[0] + share * (steps.at(-1) - steps[0]);
      const nearest = points.reduce((a, b) =>
        Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a,
      )[0];
      return [nearest, nearest];
    },
    chosen: () => state.ranges.step ?? null,
    choose: (range) => points.length && setRange("step", range),
  });

  function update(table) {
    const lines = { training: table.curve("training"), evaluation: table.curve("evaluation") };
    points = lines[state.source] ?? [];
    steps = [...lines.training, ...lines.evaluation].map((point) => point[0]).sort((a, b) => a - b);
    picture.replaceChildren();
    const range = state.ranges.step;
    element.classList.toggle("filtered", Boolean(range));
    title.textContent = "mean reward";
    values.textContent = range ? of(points, range, state.source) : summary(points);
    if (!steps.length) return;
    const rewards = [...lines.training, ...lines.evaluation].map((point) => point[1]);
    const [least, most] = [Math.min(0, ...rewards), Math.max(...rewards, 1e-9)];
    const x = (step) =>
      PAD + ((WIDTH - 2 * PAD) * (step - steps[0])) / (steps.at(-1) - steps[0] || 1);
    const y = (reward) =>
      HEIGHT - PAD - ((HEIGHT - 2 * PAD) * (reward - least)) / (most - least || 1);
    for (const share of [0, 0.5, 1]) {
      const level = y(least + share * (most - least));
      picture.append(svg("line", { x1: 0, x2: WIDTH, y1: level, y2: level, class: "grid" }));
    }
    if (range) {
      const [from, to] = [x(range[0]), x(range[1])];
      picture.append(
        svg("rect", { x: from - 1.5, width: to - from + 3, y: 0, height: HEIGHT, class: "chosen" }),
      );
    }
    const quiet = state.source === "evaluation" ? " quiet" : "";
    const path = lines.training.map(
      ([s, r], i) => `${i ? "L" : "M"}${x(s).toFixed(1)} ${y(r).toFixed(1)}`,
    );
    picture.append(svg("path", { d: path.join(""), class: "line" + quiet }));
    if (lines.training.length === 1)
      picture.append(
        svg("circle", { cx: x(steps[0]), cy: y(lines.training[0][1]), r: 3.2, class: "alone" }),
      );
    for (const [step, reward] of lines.evaluation) {
      const dot = { cx: x(step), cy: y(reward), r: 3.2, class: "dot" + (quiet ? "" : " quiet") };
      picture.append(svg("circle", dot));
    }
    low.textContent = stepLabel({ source: state.source, step: steps[0] });
    high.textContent = steps.length > 1 ? number(steps.at(-1)) : "";
    top.textContent = number(most, 2);
    bottom.textContent = number(least, 2);
    keys.replaceChildren(
      lines.training.length ? h("span", { class: "key" }, "training") : "",
      lines.evaluation.length ? h("span", { class: "key evaluated" }, "evaluations") : "",
    );
  }

  // Choose the step before or after the chosen one.
  function step(by) {
    if (!points.length) return;
    const range = state.ranges.step;
    const at = range
      ? points.findIndex((p) => p[0] >= (by < 0 ? range[0] : range[1]))
      : by > 0
        ? -1
        : points.length;
    const next = points[Math.min(points.length - 1, Math.max(0, at + by))][0];
    setRange("step", [next, next]);
  }

  return { element, update, step };
}

function summary(points) {
  return points.length
    ? `${number(points[0][1], 2)} → ${number(points.at(-1)[1], 2)}`
    : "no rollouts yet";
}

function of(points, [low, high], source) {
  const inside = points.filter((p) => p[0] >= low && p[0] <= high);
  const count = inside.reduce((sum, p) => sum + p[2], 0);
  const mean = count ? inside.reduce((sum, p) => sum + p[1] * p[2], 0) / count : null;
  const first = stepLabel({ source, step: low });
  const name = low === high ? first : `${first}–${number(high)}`;
  return `${name} · ${number(mean, 2)} · ${plural(count, "rollout")}`;
}
