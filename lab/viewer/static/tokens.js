// Turn the columns of a token record into one object per token.

const NUMBERS = [
  "mu",
  "pi",
  "old",
  "ref",
  "ratio",
  "entropy",
  "version",
  "mismatch",
  "correction",
  "advantage",
  "weight",
  "loss",
  "grad",
  "kept",
  "reason",
];

export function tokensOf(row) {
  return row.ids.map((id, i) => {
    const token = {
      id,
      piece: row.pieces[i],
      special: row.special[i],
      sampled: row.mask[i],
      turn: row.turns[i],
    };
    for (const name of NUMBERS) token[name] = row[name]?.[i] ?? null;
    token.metrics = Object.fromEntries(
      Object.entries(row.metrics ?? {}).map(([name, values]) => [name, values[i]]),
    );
    return token;
  });
}

export function tokensByTurn(rows) {
  const turns = new Map();
  for (const token of rows.flatMap(tokensOf)) {
    if (!token.sampled) continue;
    if (!turns.has(token.turn)) turns.set(token.turn, []);
    turns.get(token.turn).push(token);
  }
  return turns;
}

export function shownText(token) {
  if (token.piece === "") return "·"; // the character continues in the next token
  return token.piece.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");
}
