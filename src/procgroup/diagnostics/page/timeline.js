// Draws the lanes on a canvas of the size of what is visible, and moves the view by mouse, touch, buttons and keys.

const LANE = 26, AXIS = 26, LEAST_SPAN = 1, USUAL_TIME = 1e6;

class Timeline {
  constructor(read, most) {
    this.calls = new Calls(most);
    this.calls.add(read);
    this.box = document.getElementById("lanes");
    this.canvas = this.box.querySelector("canvas");
    this.spacer = document.getElementById("height");
    this.tip = document.getElementById("call");
    this.context = this.canvas.getContext("2d");
    this.hovered = this.selected = this.pointer = null;
    this.follows = false;
    this.measure();
    // At first, calls that hung for minutes do not shrink the others to nothing.
    const calls = this.lanes.flatMap((lane) => lane.calls);
    const busy = calls.reduce((last, call) => Math.max(last, call.state === "completed" ? call.end : call.start), this.begins + 1);
    this.begin = this.begins - 0.01 * (busy - this.begins);
    this.end = Math.min(busy + 0.15 * (busy - this.begins), this.ends + 0.01 * this.extent);
    this.readColours();
    this.listen();
    this.resize();
    this.writeLegend();
  }

  // Between which moments there are calls.
  measure() {
    const calls = this.lanes.flatMap((lane) => lane.calls);
    this.begins = calls.reduce((first, call) => Math.min(first, call.start), calls[0]?.start ?? 0);
    this.ends = calls.reduce((last, call) => Math.max(last, call.end), this.begins + 1);
  }

  get lanes() { return this.calls.lanes; }
  get extent() { return this.ends - this.begins; }
  get gutter() { return this.width < 560 ? 84 : 150; }
  get span() { return this.end - this.begin; }
  x(time) { return this.gutter + ((time - this.begin) / this.span) * (this.width - this.gutter); }
  time(x) { return this.begin + ((x - this.gutter) / (this.width - this.gutter)) * this.span; }
  y(lane) { return AXIS + lane * LANE - this.box.scrollTop; }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(`--${name}`).trim();
    this.colours = Object.fromEntries(["ink", "soft", "line", "stripe", "card", "wrong", "accent", "bar-ink"].map((name) => [name, read(name)]));
    this.operations = Array.from({ length: PALETTE_SIZE }, (_, number) => read(`op${number}`));
  }

  colour(call) {
    return call.state === "failed" ? this.colours.wrong : this.operations[Math.min(call.op, PALETTE_SIZE - 1)];
  }

  writeLegend() {
    const legend = document.getElementById("legend");
    legend.querySelectorAll(".operation").forEach((item) => item.remove());
    legend.prepend(...this.calls.operations.map(({ name, count }, number) => {
      const item = document.createElement("li"), swatch = document.createElement("span");
      item.className = "operation";
      swatch.className = "swatch";
      swatch.style.background = `var(--op${Math.min(number, PALETTE_SIZE - 1)})`;
      item.append(swatch, `${name} (${count})`);
      return item;
    }));
  }

  resize() {
    const height = AXIS + this.lanes.length * LANE + 6;
    this.width = this.box.clientWidth;
    this.height = Math.min(height, Math.max(Math.round(innerHeight * 0.7), 160));
    this.canvas.style.height = `${this.height}px`;
    this.spacer.style.height = `${height - this.height}px`;
    this.canvas.width = Math.round(this.width * devicePixelRatio);
    this.canvas.height = Math.round(this.height * devicePixelRatio);
    this.redraw();
  }

  redraw() {
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => { this.isDue = false; this.draw(); });
  }

  draw() {
    const { context } = this;
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    context.font = font(11.5);
    context.textBaseline = "middle";
    const first = Math.max(Math.floor(this.box.scrollTop / LANE), 0);
    const last = Math.min(Math.ceil((this.box.scrollTop + this.height - AXIS) / LANE), this.lanes.length);
    const ticks = this.ticks();
    for (let lane = first; lane < last; lane++) this.drawStripe(lane);
    for (let lane = first; lane < last; lane++) this.drawGaps(lane);
    for (const [, x] of ticks) this.fill(this.colours.line, x, AXIS, 1, this.height);
    for (let lane = first; lane < last; lane++) this.drawLane(lane);
    this.drawMarked();
    this.drawLabels(first, last);
    this.drawAxis(ticks);
  }

  fill(colour, x, y, width, height) {
    this.context.fillStyle = colour;
    this.context.fillRect(x, y, width, height);
  }

  drawStripe(number) {
    if (this.lanes[number].rank % 2) this.fill(this.colours.stripe, 0, this.y(number), this.width, LANE);
  }

  // While the calls were made that the records do not hold.
  drawGaps(number) {
    const y = this.y(number) + 3;
    for (const [begin, end] of this.lanes[number].gaps) {
      const left = Math.max(this.x(begin), this.gutter), right = Math.min(this.x(end), this.width);
      if (right <= left) continue;
      this.context.strokeStyle = this.colours.line;
      this.drawHatched(left, y, right - left, LANE - 6);
    }
  }

  drawLane(number) {
    const lane = this.lanes[number], y = this.y(number);
    for (const calls of lane.inRows) {
      let drawn = -1;
      for (let at = firstAfter(calls, this.begin); at < calls.length && calls[at].start <= this.end; at++) {
        const call = calls[at], right = this.x(call.end);
        // Of many calls in one pixel the first is drawn, and each that stands out.
        if (right < drawn && call.state === "completed") continue;
        this.drawCall(call, y);
        drawn = Math.max(Math.floor(right) + 1, drawn);
      }
    }
  }

  rectangle(call, y) {
    const height = (LANE - 4) / call.lane.rows;
    const left = Math.max(this.x(call.start), this.gutter - 4), right = Math.min(this.x(call.end), this.width + 4);
    return [left, y + 2 + call.row * height, Math.max(right - left, 1), Math.max(height - (call.lane.rows > 1 ? 1 : 0), 2)];
  }

  drawCall(call, y) {
    const { context } = this, [left, top, width, height] = this.rectangle(call, y);
    const isOpen = ["started", "issued", "queued"].includes(call.state);
    context.fillStyle = this.colour(call);
    context.globalAlpha = isOpen ? 0.3 : 1;
    context.fillRect(left, top, width, height);
    context.globalAlpha = 1;
    if (isOpen) this.drawOpen(call.end - call.start, left, top, width, height);
    else if (call.waited > 0) this.drawWaited(call, left, top, height);
    if (call.state === "failed") this.drawFailed(left, top, height);
    if (width > 46 && height >= 10) {
      context.save();
      context.font = font(height < 14 ? 9.5 : 11.5);
      context.beginPath();
      context.rect(left, top, width - 4, height);
      context.clip();
      const x = Math.max(left, this.gutter) + 5;
      if (isOpen) this.fill(this.colours.card, x - 3, top + 3, context.measureText(call.name).width + 6, height - 6);
      context.fillStyle = isOpen ? this.colours.ink : this.colours["bar-ink"];
      context.fillText(call.name, x, top + height / 2 + 0.5);
      context.restore();
    }
  }

  // Below the part of a call in which it waited for the last rank is a paler line.
  drawWaited(call, left, top, height) {
    const until = Math.min(this.x(call.start + call.waited), this.width + 4);
    if (until - left < 1.5) return;
    this.context.globalAlpha = 0.45;
    this.context.fillStyle = this.colours.card;
    this.context.fillRect(left, top + height - Math.min(5, height / 3), until - left, Math.min(5, height / 3));
    this.context.globalAlpha = 1;
  }

  // A call that has not ended is marked when that is unusual.
  drawOpen(lasts, left, top, width, height) {
    const { context } = this;
    context.strokeStyle = context.fillStyle;
    this.drawHatched(left, top, width, height);
    if (lasts < USUAL_TIME) return;
    context.strokeStyle = this.colours.wrong;
    context.lineWidth = 1.5;
    context.strokeRect(left + 0.75, top + 0.75, Math.max(width - 1.5, 1), height - 1.5);
  }

  drawHatched(left, top, width, height) {
    const { context } = this;
    context.save();
    context.beginPath();
    context.rect(left, top, width, height);
    context.clip();
    context.lineWidth = 2;
    context.beginPath();
    for (let x = left - (left % 9) - height; x < left + width; x += 9) {
      context.moveTo(x, top + height);
      context.lineTo(x + height, top);
    }
    context.stroke();
    context.restore();
  }

  drawFailed(left, top, height) {
    const { context } = this;
    context.fillStyle = this.colours.wrong;
    context.beginPath();
    context.moveTo(left - 4, top - 2);
    context.lineTo(left + 5, top - 2);
    context.lineTo(left + 0.5, top + 5);
    context.fill();
    context.fillRect(left, top, 2, height);
  }

  // The ranks' calls of one collective are outlined together.
  drawMarked() {
    const marked = this.hovered ?? this.selected;
    if (!marked) return;
    const { context } = this;
    for (const call of marked.peers.length ? marked.peers : [marked]) {
      const [left, top, width, height] = this.rectangle(call, this.y(this.lanes.indexOf(call.lane)));
      context.strokeStyle = this.colours.ink;
      context.lineWidth = call === marked ? 2.5 : 1;
      context.strokeRect(left - 1, top - 1, width + 2, height + 2);
    }
  }

  drawLabels(first, last) {
    const { context } = this;
    this.fill(this.colours.card, 0, 0, this.gutter, this.height);
    const groups = new Set(this.lanes.map((lane) => lane.key)).size;
    context.save();
    context.beginPath();
    context.rect(0, AXIS, this.gutter - 4, this.height);
    context.clip();
    for (let number = first; number < last; number++) {
      const lane = this.lanes[number], y = this.y(number) + LANE / 2;
      const isFirst = number === 0 || this.lanes[number - 1].rank !== lane.rank;
      context.fillStyle = lane === this.selected?.lane ? this.colours.accent : this.colours.ink;
      if (isFirst) context.fillText(`rank ${lane.rank}`, 10, y);
      context.fillStyle = this.colours.soft;
      if (groups > 1) context.fillText(this.width < 560 ? lane.group : `group ${lane.group}`, 66, y);
    }
    context.restore();
    this.fill(this.colours.line, this.gutter - 1, 0, 1, this.height);
  }

  // The moments that are marked, with where they are: [[text, x], ...]
  ticks() {
    const step = tickStep(this.span / Math.max((this.width - this.gutter) / 110, 1)), found = [];
    for (let number = Math.ceil(Math.max(this.begin, 0) / step); number * step <= this.end; number++)
      found.push([tickText(number * step, step), Math.round(this.x(number * step))]);
    return found;
  }

  drawAxis(ticks) {
    this.fill(this.colours.card, 0, 0, this.width, AXIS - 1);
    this.fill(this.colours.line, 0, AXIS - 1, this.width, 1);
    for (const [text, x] of ticks) {
      if (x < this.gutter || x + 60 > this.width) continue;
      this.fill(this.colours.line, x, AXIS - 7, 1, 7);
      this.context.fillStyle = this.colours.soft;
      this.context.fillText(text, x + 4, AXIS / 2 - 1);
    }
  }
}

function font(size) {
  return `${size}px system-ui, "DejaVu Sans", sans-serif`;
}

function tickStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least);
}

// As many digits as tell two ticks apart.
function tickText(time, step) {
  const [divisor, unit] = step >= 1e5 ? [1e6, "s"] : step >= 100 ? [1e3, "ms"] : [1, "µs"];
  const digits = Math.max(0, -Math.floor(Math.log10(step / divisor) + 1e-9));
  return `${(time / divisor).toFixed(digits)} ${unit}`;
}
