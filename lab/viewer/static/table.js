// All rollouts of a run, by column, and which of them pass the filters.
//
// A row has a bit for every filter that it fails. The histogram of a filter counts the rows that
// pass all other filters, so it shows what another range would add.

export const RANGES = ["step", "reward", "advantage", "length", "turns", "staleness", "push"];
const CHOICES = ["env", "stop", "used"];
const BITS = Object.fromEntries(
  [...RANGES, ...CHOICES, "q", "source"].map((name, i) => [name, 1 << i]),
);
const MAX_BINS = 24;

export class Table {
  constructor() {
    this.generation = 0;
    this.clear();
  }

  clear() {
    this.size = 0;
    this.bins = {};
    this.columns = {};
    this.groups = []; // consecutive rows of one question in one step
    this.groupOf = []; // index in `groups` of each row
    this.titles = {};
    this.fails = new Uint32Array(0);
    this.found = null; // rows that the text search found
  }

  // Return the first row to request. The token record of a step is written after its rollouts, so rows
  // of the last two steps whose `push` (sum of |gradient|) is unknown are requested again.
  next() {
    const { source, step, used, push } = this.columns;
    let last = 0,
      first = this.size;
    for (let row = 0; row < this.size; row++)
      if (source[row] === "training") last = Math.max(last, step[row]);
    if (!this.facts?.record && last > 2) return first;
    for (let row = this.size - 1; row >= 0; row--) {
      if (source[row] === "training" && step[row] >= last - 1 && used[row] && push[row] === null)
        first = row;
    }
    return first;
  }

  // Store rows from number `start` on. Return true if anything changed.
  add(chunk) {
    if (chunk.generation !== this.generation) this.clear();
    this.generation = chunk.generation;
    this.facts = chunk;
    Object.assign(this.titles, chunk.titles);
    const before = this.size;
    const added = Object.values(chunk.columns)[0].length;
    if (!added) return before === 0;
    let changed = this.size !== chunk.start + added;
    for (const [name, values] of Object.entries(chunk.columns)) {
      const column = (this.columns[name] ??= []);
      for (let i = 0; i < added; i++) {
        const place = chunk.start + i;
        if (place < before && column[place] !== values[i]) changed = true;
        column[place] = values[i];
      }
    }
    this.size = Math.max(this.size, chunk.start + added);
    for (let row = before; row < this.size; row++) this.#group(row);
    this.fails = grown(this.fails, this.size);
    if (changed) {
      this.bins = {};
      this.rewardEnds = undefined;
    }
    return changed;
  }

  #group(row) {
    const { step, group_id, source } = this.columns;
    const last = this.groups.at(-1);
    if (
      last &&
      last.source === source[row] &&
      last.step === step[row] &&
      last.group === group_id[row] &&
      last.end === row
    ) {
      last.end++;
    } else {
      this.groups.push({
        source: source[row],
        step: step[row],
        group: group_id[row],
        start: row,
        end: row + 1,
      });
    }
    this.groupOf[row] = this.groups.length - 1;
  }

  // Update the bits of all filters in every row, or only the bit of the filter `only`.
  filter(state, only = null) {
    for (const name of only ? [only] : Object.keys(BITS))
      this.#setBit(name, passes(this, state, name));
  }

  #setBit(name, pass) {
    const bit = BITS[name];
    const { fails, size } = this;
    for (let row = 0; row < size; row++) {
      if (pass === null || pass(row)) fails[row] &= ~bit;
      else fails[row] |= bit;
    }
  }

  passes(row) {
    return this.fails[row] === 0;
  }

  matching() {
    return this.groups.filter((group) => {
      for (let row = group.start; row < group.end; row++) if (!this.fails[row]) return true;
      return false;
    });
  }

  // Return true if the rewards of a group differ.
  differs(group) {
    return new Set(this.columns.reward.slice(group.start, group.end)).size > 1;
  }

  // Return true if a group has a token record.
  recorded(group) {
    return this.columns.push.slice(group.start, group.end).some((push) => push !== null);
  }

  // Return {low, high, width, all, passing} of one column, over the rows of the shown source.
  histogram(name) {
    const column = this.columns[name] ?? [];
    const bins = (this.bins[`${name}.${this.source}`] ??= this.#layout(column));
    if (!bins) return null;
    const passing = new Uint32Array(bins.all.length);
    const others = ~BITS[name];
    for (let row = 0; row < this.size; row++) {
      if (column[row] !== null && !(this.fails[row] & others)) passing[binOf(bins, column[row])]++;
    }
    return { ...bins, passing };
  }

  #layout(column) {
    let low = Infinity,
      high = -Infinity,
      whole = true;
    const isCounted = (row) => column[row] !== null && !(this.fails[row] & BITS.source);
    for (let row = 0; row < this.size; row++) {
      if (!isCounted(row)) continue;
      low = Math.min(low, column[row]);
      high = Math.max(high, column[row]);
      whole &&= Number.isInteger(column[row]);
    }
    if (low === Infinity) return null;
    const each = whole && high - low < MAX_BINS;
    const count = each ? high - low + 1 : MAX_BINS;
    const width = each
      ? 1
      : whole
        ? Math.ceil((high - low + 1) / MAX_BINS)
        : (high - low) / MAX_BINS || 1;
    const bins = { low, high, width, whole, all: new Uint32Array(count) };
    for (let row = 0; row < this.size; row++) if (isCounted(row)) bins.all[binOf(bins, column[row])]++;
    return bins;
  }

  // Return the mean reward of every step of a source: [[step, mean, count], ...]. As in
  // train/reward, replayed rollouts and demonstrations do not count, unless a step has no others.
  curve(source) {
    const sums = new Map(); // step -> [sum and count of new rollouts, sum and count of the others]
    const columns = this.columns;
    for (let row = 0; row < this.size; row++) {
      if (columns.source[row] !== source || columns.reward[row] === null) continue;
      const entry = sums.get(columns.step[row]) ?? [0, 0, 0, 0];
      const at = columns.new[row] ? 0 : 2;
      entry[at] += columns.reward[row];
      entry[at + 1]++;
      sums.set(columns.step[row], entry);
    }
    return [...sums]
      .map(([step, entry]) => [step, ...(entry[1] ? entry : entry.slice(2))])
      .map(([step, sum, count]) => [step, sum / count, count])
      .sort((a, b) => a[0] - b[0]);
  }

  values(name) {
    const counts = new Map();
    const column = this.columns[name] ?? [];
    for (let row = 0; row < this.size; row++) {
      if (!(this.fails[row] & BITS.source))
        counts.set(column[row], (counts.get(column[row]) ?? 0) + 1);
    }
    return [...counts].sort((a, b) => b[1] - a[1]);
  }

  address(row) {
    const { source, step, group_id, place } = this.columns;
    return [source[row], step[row], group_id[row], place[row]].join(".");
  }

  rowAt(address) {
    const [source, step, group, place] = address.split(".");
    for (const g of this.groups) {
      if (g.source !== source || `${g.step}` !== step || `${g.group}` !== group) continue;
      // If a question is sampled again later, its rows form another group, whose places continue the numbering.
      const row = g.start + Number(place) - this.columns.place[g.start];
      if (row >= g.start && row < g.end) return row;
    }
    return -1;
  }
}

function passes(table, state, name) {
  const column = table.columns[name];
  if (name === "source") return (row) => column[row] === state.source;
  if (name === "q") return table.found ? (row) => table.found.has(row) : null;
  if (name === "used") return state.used ? (row) => String(column[row]) === state.used : null;
  if (CHOICES.includes(name)) {
    const chosen = state[name] ? new Set(state[name].split(",")) : null;
    return chosen && ((row) => chosen.has(column[row]));
  }
  const range = state.ranges[name];
  return range
    ? (row) => column[row] !== null && column[row] >= range[0] && column[row] <= range[1]
    : null;
}

export function binOf(bins, value) {
  return Math.min(bins.all.length - 1, Math.floor((value - bins.low) / bins.width));
}

function grown(array, size) {
  const larger = new Uint32Array(size);
  larger.set(array);
  return larger;
}
