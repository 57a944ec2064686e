// The state of the page is in the address after "#", so that a link or the back button restores the state.
//
//     #run=name&source=training&step=120..120&reward=0..0.5&open=training.120.961.3&colour=6

const DEFAULTS = {
  run: "",
  source: "",
  open: "",
  colour: "0",
  update: "0",
  compare: "group",
  raw: "",
  folded: "",
  q: "",
  env: "",
  stop: "",
  used: "",
};
const ranges = new Set(["step", "reward", "advantage", "length", "turns", "staleness", "push"]);
const listeners = new Set();

export const state = { ...DEFAULTS, ranges: {} };

export function read() {
  const params = new URLSearchParams(location.hash.slice(1));
  Object.assign(state, DEFAULTS, { ranges: {} });
  for (const [name, value] of params) {
    if (name in DEFAULTS) state[name] = value;
    else if (ranges.has(name)) {
      const [low, high] = value.split("..").map(Number);
      if (!Number.isNaN(low)) state.ranges[name] = [low, high ?? low];
    }
  }
}

// With `kept`, the change adds no entry to the browser's history.
export function set(changes, { kept = true } = {}) {
  Object.assign(state, changes);
  const params = new URLSearchParams();
  for (const name of Object.keys(DEFAULTS)) {
    if (state[name] !== DEFAULTS[name]) params.set(name, state[name]);
  }
  for (const [name, range] of Object.entries(state.ranges)) {
    params.set(name, range[0] === range[1] ? `${range[0]}` : range.join(".."));
  }
  const hash = "#" + params.toString().replaceAll("%2C", ",");
  if (hash !== location.hash) history[kept ? "replaceState" : "pushState"](null, "", hash);
  for (const listener of listeners) listener(Object.keys(changes));
}

export function setRange(name, range) {
  const next = { ...state.ranges };
  if (range) next[name] = range;
  else delete next[name];
  set({ ranges: next });
}

export function onChange(listener) {
  listeners.add(listener);
}

window.addEventListener("hashchange", () => {
  read();
  for (const listener of listeners) listener(Object.keys(state));
});
