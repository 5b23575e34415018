"use strict";
// The calls of the page as objects: in lanes, one for each rank and group, and found by time or as one collective.
// Times are microseconds since the first call.

const STATES = ["completed", "started", "failed", "issued"];
const PALETTE_SIZE = 8;
const MOST_ROWS = 4;

// A lane: {rank, group, until, calls, rows}. A call that has not ended lasts until its rank was last seen.
function readLanes(page) {
  for (const lane of page.lanes) {
    lane.calls = lane.calls.map((fields) => readCall(page, lane, fields));
    stack(lane);
  }
  return page.lanes;
}

function readCall(page, lane, [start, end, op, text, line, state, sequence, queued]) {
  return {
    lane, start, op, sequence, queued,
    end: end ?? Math.max(lane.until, start),
    name: page.ops[op] + (sequence ? ` #${sequence}` : ""),
    isMessage: page.messages.includes(op),
    text: page.texts[text],
    line: page.texts[line],
    state: STATES[state],
    peers: [],
    row: 0,
  };
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
function joinCollectives(lanes) {
  const found = new Map();
  for (const lane of lanes) {
    for (const call of lane.calls) {
      if (call.isMessage || call.state === "issued") continue;
      const key = `${lane.key} ${call.sequence}`;
      if (!found.has(key)) found.set(key, []);
      found.get(key).push(call);
    }
  }
  for (const calls of found.values()) {
    const last = calls.reduce((latest, call) => (call.start > latest.start ? call : latest));
    const isWhole = calls.length === last.lane.size;
    for (const call of calls) {
      call.peers = calls;
      call.last = last;
      call.waited = isWhole ? Math.max(Math.min(last.start, call.end) - call.start, 0) : 0;
    }
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
  else lines.push(`took ${length}, from ${duration(call.start)} on`);
  if (call.queued > 0.5) lines.push(`had waited ${duration(call.queued)} for its turn`);
  if (call.waited > 0.5) lines.push(`waited ${duration(call.waited)} for rank ${call.last.lane.rank}, the last to come`);
  else if (call.last === call && call.peers.length > 1) lines.push("the last of its ranks to come");
  return lines;
}
