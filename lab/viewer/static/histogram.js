// One histogram: grey bars count all rollouts, blue bars those that pass all other filters. Dragging
// sets the filter of the histogram.

import { h, number, svg } from "./dom.js";
import { brushed } from "./brush.js";
import { setRange, state } from "./state.js";

const BAR_HEIGHT = 34;

export function histogram(name, label, hint) {
  const picture = svg("svg", { class: "bars", preserveAspectRatio: "none" });
  const low = h("span"),
    high = h("span"),
    chosen = h("b");
  const clear = h(
    "button",
    { class: "clear", title: "remove this filter", onclick: () => setRange(name, null) },
    "×",
  );
  const element = h(
    "figure",
    { class: "histogram", title: hint, "data-name": name },
    h("figcaption", {}, h("span", {}, label), chosen, clear),
    picture,
    h("div", { class: "ends" }, low, high),
  );
  let bins = null;

  brushed(picture, {
    place: (share) => {
      const i = Math.min(bins.all.length - 1, Math.floor(share * bins.all.length));
      const start = bins.low + i * bins.width;
      return bins.whole ? [start, start + bins.width - 1] : [start, start + bins.width];
    },
    chosen: () => state.ranges[name] ?? null,
    choose: (range) => bins && setRange(name, range && range.map((x) => Number(x.toPrecision(6)))),
  });

  function update(table) {
    bins = table.histogram(name);
    const range = state.ranges[name];
    element.classList.toggle("filtered", Boolean(range));
    element.classList.toggle("none", !bins);
    picture.replaceChildren();
    if (!bins) {
      low.textContent = "no data";
      high.textContent = chosen.textContent = "";
      return;
    }
    const count = bins.all.length;
    const most = Math.max(...bins.all, 1);
    // The square root keeps a bar of few rollouts visible beside a bar of thousands.
    const height = (value) => (value ? Math.max(1.5, BAR_HEIGHT * Math.sqrt(value / most)) : 0);
    picture.setAttribute("viewBox", `0 0 ${count} ${BAR_HEIGHT}`);
    const wide = Math.min(0.84, 0.1 + count / 10); // bars are narrower if there are few of them
    for (let i = 0; i < count; i++) {
      const start = bins.low + i * bins.width;
      const inside = !range || (start + bins.width > range[0] && start <= range[1]);
      const bar = (value, kind) =>
        svg("rect", {
          x: i + (1 - wide) / 2,
          width: wide,
          y: BAR_HEIGHT - height(value),
          height: height(value),
          class: kind,
        });
      picture.append(bar(bins.all[i], "all"));
      picture.append(bar(bins.passing[i], inside ? "passing" : "outside"));
    }
    low.textContent = number(bins.low, 2);
    high.textContent = bins.high === bins.low ? "" : number(bins.high, 2);
    chosen.textContent = range ? rangeText(range) : "";
  }

  return { element, update };
}

function rangeText([low, high]) {
  return low === high ? number(low, 2) : `${number(low, 2)} – ${number(high, 2)}`;
}
