"use strict";
// The calls of the page as objects: in lanes, one for each rank and group, and found by time or as one collective.
// Times are microseconds since the moment that the page counts from.

const STATES = ["completed", "started", "failed", "issued", "queued"];
const PALETTE_SIZE = 8;
const MOST_ROWS = 4;

function hasEnded(call) { return call.state === "completed" || call.state === "failed"; }

// What the records have held so far, as far as it was read.
class Calls {
  // Of a lane, the newest calls are kept, `most` at most.
  constructor(most = Infinity) {
    this.most = most;
    this.lanes = [];
    this.operations = [];  // {name, count}; their order chooses their colours
    this.collectives = new Map();
  }

  // Add the calls that were read: new ones, and all that have not ended. One that is here already is changed.
  add(read) {
    const operations = read.ops.map((name) => this.operation(name));
    const lost = new Set(this.lanes.flatMap((lane) => lane.calls.filter((call) => !hasEnded(call))));
    const joined = new Set();
    for (const part of read.lanes) {
      const lane = this.lane(part);
      if (part.whole !== null && part.whole > lane.known) lane.gaps.push([lane.known, part.whole]);
      lane.known = read.now;
      lane.until = part.until;
      for (const fields of part.calls) {
        const call = this.put(lane, fields, read, operations);
        lost.delete(call);
        if (call.collective) joined.add(call.collective);
      }
    }
    // Calls that had not ended, and of which the records say nothing any more.
    for (const call of lost) this.drop(call);
    for (const lane of this.lanes) this.tidy(lane);
    this.sortLanes();
    joined.forEach(compareArrivals);
  }

  operation(name) {
    let number = this.operations.findIndex((operation) => operation.name === name);
    if (number < 0) number = this.operations.push({ name, count: 0 }) - 1;
    return number;
  }

  // A lane: {rank, group, key, size, until, calls, rows}. A call that has not ended lasts until its rank was last seen.
  lane({ rank, group, key, size }) {
    let lane = this.lanes.find((one) => one.rank === rank && one.key === key);
    if (!lane) {
      lane = { rank, group, key, size, known: -Infinity, gaps: [], calls: [], found: new Map() };
      this.lanes.push(lane);
    }
    return lane;
  }

  put(lane, [start, end, op, text, line, state, sequence, queued, index], read, operations) {
    let call = lane.found.get(index);
    if (!call) {
      call = { lane, index, op: operations[op], isMessage: read.messages.includes(op), peers: [], waited: 0, row: 0 };
      lane.found.set(index, call);
      lane.calls.push(call);
      this.operations[call.op].count++;
    }
    Object.assign(call, {
      start, sequence, queued,
      end: end ?? Math.max(lane.until, start),
      name: read.ops[op] + (sequence ? ` #${sequence}` : ""),
      text: read.texts[text],
      line: read.texts[line],
      state: STATES[state],
    });
    if (!call.collective && !call.isMessage && call.state !== "issued") this.join(call);
    return call;
  }

  join(call) {
    const key = `${call.lane.key} ${call.sequence}`;
    if (!this.collectives.has(key)) this.collectives.set(key, []);
    call.collective = this.collectives.get(key);
    call.collective.push(call);
  }

  drop(call) {
    call.lane.found.delete(call.index);
    call.lane.calls.splice(call.lane.calls.indexOf(call), 1);
    this.operations[call.op].count--;
    this.collectives.delete(`${call.lane.key} ${call.sequence}`);
  }

  tidy(lane) {
    lane.calls.sort((one, other) => one.start - other.start);
    const before = lane.calls.length;
    while (lane.calls.length > this.most) this.drop(lane.calls[0]);
    if (lane.calls.length < before) {
      const first = lane.calls[0].start;
      lane.gaps = [[-Infinity, first], ...lane.gaps.filter(([, end]) => end > first)];
    }
    stack(lane);
  }

  // By rank, the largest group first. A rank that has made no call has a lane without a group.
  sortLanes() {
    const busy = new Set(this.lanes.filter((lane) => lane.key).map((lane) => lane.rank));
    this.lanes = this.lanes.filter((lane) => lane.key || !busy.has(lane.rank));
    this.lanes.sort((one, other) => one.rank - other.rank || other.size - one.size || (one.key < other.key ? -1 : 1));
  }
}

// Calls of a lane that overlap, such as messages, are drawn in rows of the lane, below each other.
function stack(lane) {
  const ends = [];
  for (const call of lane.calls) {
    let row = ends.findIndex((end) => end <= call.start);
    if (row < 0) row = Math.min(ends.length, MOST_ROWS - 1);
    ends[row] = Math.max(ends[row] ?? 0, call.end);
    call.row = row;
  }
  lane.rows = Math.max(ends.length, 1);
  // Of a row, so that a moment is found by halving: the ends of a row's calls ascend, except in the last one.
  lane.inRows = Array.from({ length: lane.rows }, (_, row) => lane.calls.filter((call) => call.row === row));
}

// Give each call of a collective the list of all its ranks' calls, and how long it waited for the last of them.
function compareArrivals(calls) {
  const last = calls.reduce((latest, call) => (call.start > latest.start ? call : latest));
  const isWhole = calls.length === last.lane.size;
  for (const call of calls) {
    call.peers = calls;
    call.last = last;
    call.waited = isWhole ? Math.max(Math.min(last.start, call.end) - call.start, 0) : 0;
  }
}

// The number of the first call of a row that ends after a moment.
function firstAfter(calls, moment) {
  let low = 0, high = calls.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (calls[middle].end < moment) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The call of a row at a moment, or the nearest one at most `tolerance` away.
function callAt(calls, moment, tolerance) {
  let best = null, distance = tolerance;
  for (let at = firstAfter(calls, moment - tolerance); at < calls.length && calls[at].start <= moment + tolerance; at++) {
    const call = calls[at];
    const away = Math.max(call.start - moment, moment - call.end, 0);
    if (away <= distance) [best, distance] = [call, away];
    if (away === 0) break;
  }
  return best;
}

function duration(us) {
  const [divisor, unit] = us >= 1e6 ? [1e6, "s"] : us >= 1e3 ? [1e3, "ms"] : [1, "µs"];
  return `${Number((us / divisor).toPrecision(3))} ${unit}`;
}

// What there is to say of a call, line by line; a line that begins with "!" is bad news.
function describe(call) {
  const { lane } = call;
  const lines = [`rank ${lane.rank}: ${call.text}`];
  lines.push(`${call.name} of group ${lane.group}${call.line ? ` at ${call.line}` : ""}`);
  const length = duration(call.end - call.start);
  if (call.state === "started") lines.push(`! has not ended, for ${length}`);
  else if (call.state === "failed") lines.push(`! failed after ${length}`);
  else if (call.state === "issued") lines.push(`! waits for its turn, for ${length}`);
  else if (call.state === "queued") lines.push(`! its GPU has not finished it, for ${length}`);
  else lines.push(`took ${length}, from ${duration(call.start)} on`);
  if (call.queued > 0.5) lines.push(`had waited ${duration(call.queued)} for its turn`);
  if (call.waited > 0.5) lines.push(`waited ${duration(call.waited)} for rank ${call.last.lane.rank}, the last to come`);
  else if (call.last === call && call.peers.length > 1) lines.push("the last of its ranks to come");
  return lines;
}
