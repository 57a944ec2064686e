// The colours of tokens. `paint` returns a background colour, which is stronger for larger values.

const tint = (colour, share) =>
  `color-mix(in srgb, var(--${colour}) ${Math.round(62 * Math.min(1, Math.max(0, share)))}%, transparent)`;
const both = (value, size, up = "up", down = "down") =>
  value === 0 ? null : tint(value > 0 ? up : down, 0.12 + (0.88 * Math.abs(value)) / size);

export const COLOURS = [
  { name: "plain", means: "the text without colours" },
  {
    name: "advantage",
    reads: "advantage",
    ends: ["−", "+"],
    scale: ["down", "up"],
    means: "whether the rollout is better or worse than its group",
    paint: (token, scales) => both(token.advantage, scales.advantage),
  },
  {
    name: "ratio",
    reads: "ratio",
    ends: ["0.6", "1.7"],
    scale: ["cold", "warm"],
    means: "how much more probable than before (pi / anchor)",
    paint: (token) => both(Math.log(token.ratio), 0.5, "warm", "cold"),
  },
  {
    name: "entropy",
    reads: "entropy",
    ends: ["0", "2.5 nats"],
    scale: ["", "heat"],
    means: "how uncertain the policy was",
    paint: (token) => tint("heat", token.entropy / 2.5),
  },
  {
    name: "version",
    reads: "version",
    ends: ["this step’s", "4 behind"],
    scale: ["", "age"],
    means: "how old the weights were that sampled the token",
    paint: (token, scales) => tint("age", 0.1 + (scales.step - token.version) / 4),
  },
  {
    name: "mismatch",
    reads: "mismatch",
    ends: ["0", "0.2 nats"],
    scale: ["", "down"],
    means: "difference between the trainer's and the server's logprob, before the update",
    paint: (token) => tint("down", Math.abs(token.mismatch) / 0.2),
  },
  {
    name: "grad",
    reads: "grad",
    ends: ["pushed down", "pushed up"],
    scale: ["down", "up"],
    means: "how training moved the token's probability; hatched: clipped or dropped",
    // A training step goes against the gradient, so a negative gradient makes the token more probable.
    // The square root makes weak gradients visible, because a long rollout has many of them.
    paint: (token, scales) =>
      both(-Math.sign(token.grad) * Math.sqrt(Math.abs(token.grad) / scales.grad), 1),
    hatched: (token) => token.grad === 0 && token.reason !== null && token.advantage !== 0,
  },
];

// Return the colour of a dot by its reward, between the worst and the best of the run.
export function rewardStyle(reward, table) {
  if (reward === null || reward === undefined) return {};
  const [low, high] = rewardEnds(table);
  const share = high > low ? (reward - low) / (high - low) : reward > 0 ? 1 : 0;
  return { "--share": `${Math.round(100 * share)}%` };
}

// Return the worst and the best reward of a run.
export function rewardEnds(table) {
  if (table.rewardEnds) return table.rewardEnds;
  let low = Infinity,
    high = -Infinity;
  for (const reward of table.columns.reward) {
    if (reward === null) continue;
    if (reward < low) low = reward;
    if (reward > high) high = reward;
  }
  return (table.rewardEnds = [low, high]);
}
