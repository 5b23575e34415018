// The page of a running job: asks for its state again and again, while the page is visible, and shows it.

const SECONDS_BETWEEN_READS = 1, SECONDS_AFTER_A_FAILURE = 3, MOST_CALLS_OF_A_LANE = 4096;
const WAITS = 6;  // the column of the share of time that a rank waits
const FIRST_CALLS = 100, LEAST_FIRST_SPAN = 1e6, MOST_FIRST_SPAN = 60e6;

const element = (id) => document.getElementById(id);

// Text that has not changed is left alone, with what the user has selected of it.
function write(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

function sized(parent, count, make) {
  while (parent.children.length > count) parent.lastElementChild.remove();
  while (parent.children.length < count) parent.append(make());
  return [...parent.children];
}

function showHeader(state) {
  write(element("name"), state.name);
  write(element("program"), state.program);
  write(element("summary"), state.summary);
  sized(element("findings"), state.findings.length, () => document.createElement("li")).forEach((item, number) => {
    [item.className] = state.findings[number];
    write(item, state.findings[number][1]);
  });
}

function showBadge(kind, text) {
  element("badge").className = `badge ${kind}`;
  write(element("badge"), text);
}

function makeRow() {
  const row = document.createElement("tr");
  for (const heading of document.querySelectorAll(".live th")) {
    const cell = document.createElement("td");
    cell.className = heading.className;
    cell.dataset.label = heading.textContent;
    row.append(cell);
  }
  const state = document.createElement("span"), meter = document.createElement("span"), share = document.createElement("span");
  meter.className = "meter";
  meter.append(document.createElement("i"));
  row.children[1].append(state);
  row.children[WAITS].append(meter, share);
  return row;
}

function showRows(rows) {
  sized(document.querySelector(".live tbody"), rows.length, makeRow).forEach((shown, number) => {
    const row = rows[number], slow = row.slowest && row.state === "running";
    shown.className = row.cause ? "cause" : slow ? "slow" : "";
    row.cells.forEach((text, column) => write(shown.children[column].querySelector("span:last-child") ?? shown.children[column], text));
    shown.children[1].firstChild.className = `state ${slow ? "slow" : row.state}`;
    shown.children[WAITS].querySelector("i").style.width = `${100 * row.waits}%`;
  });
}

function show(state) {
  showHeader(state);
  showRows(state.rows);
  if (state.ended) showBadge("ended", "ended: this is the last state");
  else showBadge("running", "live");
  document.querySelector("button[data-do=follow]").disabled = state.ended;
}

async function read() {
  const address = new URL("state", location.href);
  address.searchParams.set("token", new URLSearchParams(location.search).get("token"));
  address.searchParams.set("since", lastRead);
  const answer = await fetch(address, { cache: "no-store" });
  if (!answer.ok) throw new Error(`${answer.status}`);
  return answer.json();
}

async function update() {
  let pause = SECONDS_BETWEEN_READS, state;
  try {
    state = await read();
  } catch {
    showBadge("lost", `procgroup top does not answer: this is the state of ${new Date(lastAnswer).toLocaleTimeString()}`);
    pause = SECONDS_AFTER_A_FAILURE;
  }
  if (state) {
    [lastRead, lastAnswer] = [state.calls.now, Date.now()];
    show(state);
    timeline.update(state.calls, !state.ended);
  }
  document.body.dataset.reads = String(++reads);
  if (!state?.ended) waitFor(pause);
}

// A hidden page asks for nothing.
function waitFor(seconds) {
  setTimeout(() => {
    if (document.hidden) document.addEventListener("visibilitychange", update, { once: true });
    else update();
  }, 1000 * seconds);
}

// Some steps of the program: the time of the newest calls of the busiest lane.
function firstSpan() {
  const { calls } = timeline.lanes.reduce((most, lane) => (lane.calls.length > most.calls.length ? lane : most));
  const span = calls.length ? timeline.ends - calls[Math.max(calls.length - FIRST_CALLS, 0)].start : 0;
  return Math.min(Math.max(span, LEAST_FIRST_SPAN), MOST_FIRST_SPAN);
}

const first = JSON.parse(element("data").textContent);
const timeline = new Timeline(first.calls, MOST_CALLS_OF_A_LANE);
let lastRead = first.calls.now, lastAnswer = Date.now(), reads = 0;
show(first);
timeline.setFollows(false);
if (!first.ended) {
  timeline.follow(firstSpan());
  waitFor(SECONDS_BETWEEN_READS);
}
document.body.dataset.ready = String(timeline.lanes.length);
