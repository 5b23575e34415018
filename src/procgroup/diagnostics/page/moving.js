// How the view is moved, and what is shown of the call under the pointer or chosen by keys.

Object.assign(Timeline.prototype, {
  listen() {
    const { canvas, box } = this;
    canvas.addEventListener("wheel", (event) => this.turn(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.grab(event));
    canvas.addEventListener("pointermove", (event) => this.hover(event));
    canvas.addEventListener("pointerleave", () => { this.hovered = this.pointer = null; this.show(this.selected); });
    canvas.addEventListener("keydown", (event) => this.press(event));
    canvas.addEventListener("focus", () => { if (!this.selected && canvas.matches(":focus-visible")) this.choose(this.lanes[0]?.calls.at(-1)); });
    box.addEventListener("scroll", () => this.redraw());
    addEventListener("resize", () => this.resize());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.readColours(); this.redraw(); });
    for (const button of document.querySelectorAll("button[data-do]"))
      button.addEventListener("click", () => this.run(button.dataset.do));
  },

  run(action) {
    const middle = this.selected ? (this.selected.start + this.selected.end) / 2 : (this.begin + this.end) / 2;
    const within = Math.min(Math.max(middle, this.begin), this.end);
    if (action === "in") this.zoom(0.5, within);
    if (action === "out") this.zoom(2, within);
    if (action === "left") this.move(-0.25 * this.span);
    if (action === "right") this.move(0.25 * this.span);
    if (action === "all") this.look(this.begins, this.ends);
    if (action === "next") this.chooseNextTrouble();
    if (action === "follow" && this.isLive) this.setFollows(!this.follows);
  },

  look(begin, end) {
    const span = Math.min(Math.max(end - begin, LEAST_SPAN), this.extent * 1.05);
    this.begin = Math.min(Math.max(begin, this.begins - 0.02 * this.extent), this.ends + 0.02 * this.extent - span * 0.1);
    this.end = this.begin + span;
    this.setFollows(this.isLive && this.end >= this.ends);
    this.redraw();
  },

  // Whether the view moves on with the present.
  setFollows(follows) {
    this.follows = follows;
    document.querySelector("button[data-do=follow]")?.setAttribute("aria-pressed", String(follows));
  },

  zoom(factor, around) {
    if (this.follows) {
      this.begin = this.end - Math.min(Math.max(this.span * factor, LEAST_SPAN), this.extent * 1.05);
      this.redraw();
      return;
    }
    const share = (around - this.begin) / this.span, span = Math.max(this.span * factor, LEAST_SPAN);
    this.look(around - share * span, around + (1 - share) * span);
  },

  move(by) { this.look(this.begin + by, this.end + by); },

  turn(event) {
    const scale = event.deltaMode === 1 ? 20 : 1;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
      event.preventDefault();
      this.move(((event.deltaX || event.deltaY) * scale * this.span) / (this.width - this.gutter));
      return;
    }
    // Zoomed out as far as it goes, the wheel scrolls the page.
    if (event.deltaY > 0 && this.span >= this.extent) return;
    event.preventDefault();
    this.zoom(Math.exp(event.deltaY * scale * 0.002), this.time(Math.max(event.offsetX, this.gutter)));
  },

  grab(event) {
    const { canvas } = this, from = { x: event.clientX, begin: this.begin, y: event.clientY, top: this.box.scrollTop };
    let moved = false;
    const drag = (next) => {
      moved ||= Math.hypot(next.clientX - from.x, next.clientY - from.y) > 3;
      if (!moved) return;
      canvas.classList.add("dragged");
      const begin = from.begin - ((next.clientX - from.x) / (this.width - this.gutter)) * this.span;
      this.look(begin, begin + this.span);
      if (next.pointerType === "mouse") this.box.scrollTop = from.top - (next.clientY - from.y);
    };
    const drop = (next) => {
      canvas.removeEventListener("pointermove", drag);
      canvas.classList.remove("dragged");
      if (!moved && next.type === "pointerup") this.choose(this.under(next), false);
    };
    canvas.setPointerCapture(event.pointerId);
    canvas.addEventListener("pointermove", drag);
    canvas.addEventListener("pointerup", drop, { once: true });
    canvas.addEventListener("pointercancel", drop, { once: true });
  },

  under(event) {
    const y = event.offsetY - AXIS + this.box.scrollTop;
    const lane = event.offsetY > AXIS && event.offsetX > this.gutter ? this.lanes[Math.floor(y / LANE)] : undefined;
    if (!lane) return null;
    const row = Math.min(Math.floor(Math.max((y % LANE) - 2, 0) / ((LANE - 4) / lane.rows)), lane.rows - 1);
    return callAt(lane.inRows[row], this.time(event.offsetX), (3 * this.span) / this.width);
  },

  hover({ offsetX, offsetY }) {
    this.pointer = { offsetX, offsetY };
    const call = this.under(this.pointer);
    if (call === this.hovered && !call) return;
    this.hovered = call;
    this.show(call ?? this.selected, call ? this.pointer : undefined);
  },

  show(call, pointer) {
    this.tip.hidden = !call;
    this.redraw();
    if (!call) return;
    if (this.shown !== call || !this.tip.firstChild) {
      this.tip.replaceChildren(...describe(call).map((line) => {
        const paragraph = document.createElement("p");
        paragraph.textContent = line.replace(/^! /, "");
        if (line.startsWith("! ")) paragraph.className = "bad";
        return paragraph;
      }));
    }
    this.shown = call;
    this.place(call, pointer);
  },

  place(call, pointer) {
    this.tip.hidden = call.end < this.begin || call.start > this.end;
    const top = this.y(this.lanes.indexOf(call.lane));
    const x = pointer ? pointer.offsetX + 14 : Math.max(this.x(call.start), this.gutter);
    const below = (pointer ? pointer.offsetY + 16 : top + LANE + 4);
    const { offsetWidth, offsetHeight } = this.tip;
    const above = (pointer ? pointer.offsetY : top) - offsetHeight - 8;
    this.tip.style.left = `${Math.max(Math.min(x, this.width - offsetWidth - 6), 6)}px`;
    this.tip.style.top = `${below + offsetHeight > this.height && above > 0 ? above : below}px`;
  },

  // Select a call, and move the view so that it is seen.
  choose(call, moves = true) {
    this.selected = call ?? null;
    if (call && moves) {
      if (call.start < this.begin || call.start > this.end) this.look(call.start - this.span / 2, call.start + this.span / 2);
      const y = this.lanes.indexOf(call.lane) * LANE;
      const top = this.box.scrollTop, room = this.height - AXIS - 2 * LANE;
      if (y < top) this.box.scrollTop = y;
      else if (y > top + room) this.box.scrollTop = y - room;
    }
    this.show(this.selected);
  },

  chooseNextTrouble() {
    const trouble = this.lanes.flatMap((lane) => lane.calls.filter((call) => call.state !== "completed"));
    if (!trouble.length) return;
    this.choose(trouble[(trouble.indexOf(this.selected) + 1) % trouble.length]);
  },

  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = { "+": "in", "=": "in", "-": "out", 0: "all", n: "next", f: "follow" };
    const moves = { ArrowLeft: -1, ArrowRight: 1 }, lanes = { ArrowUp: -1, ArrowDown: 1 };
    const calls = this.selected?.lane.calls ?? this.lanes[0]?.calls ?? [];
    const at = this.selected ? calls.indexOf(this.selected) : calls.length;
    if (event.key in actions) this.run(actions[event.key]);
    else if (event.key in moves) this.choose(calls[Math.min(Math.max(at + moves[event.key], 0), calls.length - 1)]);
    else if (event.key in lanes) this.chooseLane(lanes[event.key]);
    else if (event.key === "Home") this.choose(calls[0]);
    else if (event.key === "End") this.choose(calls.at(-1));
    else if (event.key === "Escape") this.choose(null);
    else return;
    event.preventDefault();
  },

  // The call of the next lane that is nearest in time.
  chooseLane(by) {
    const from = this.selected ?? this.lanes[0]?.calls.at(-1);
    const calls = from && this.lanes[this.lanes.indexOf(from.lane) + by]?.calls;
    if (calls) this.choose(calls.reduce((best, call) => (Math.abs(call.start - from.start) < Math.abs(best.start - from.start) ? call : best)));
  },
});
