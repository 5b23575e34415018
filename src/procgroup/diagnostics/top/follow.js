// The timeline of a running job: takes in new calls, and moves on with the present until the user looks elsewhere.

const GLIDE_MILLISECONDS = 1000;
const movesSmoothly = !matchMedia("(prefers-reduced-motion: reduce)").matches;

Object.assign(Timeline.prototype, {
  // Show so many microseconds before the present, from now on.
  follow(span) {
    this.isLive = true;
    [this.begin, this.end] = [this.ends - span, this.ends];
    this.setFollows(true);
    this.redraw();
  },

  update(read, isLive) {
    this.calls.add(read);
    this.isLive = isLive;
    this.measure();
    if (isLive) this.ends = Math.max(this.ends, read.now);
    else this.setFollows(false);
    this.writeLegend();
    this.resize();
    this.shown = null;
    if (this.hovered ?? this.selected) this.show(this.hovered ?? this.selected, this.hovered && this.pointer);
    // The call under the pointer stays there.
    if (this.follows && !this.hovered) this.glide(this.end, performance.now(), (this.glides = (this.glides ?? 0) + 1));
  },

  // Move to the present until the next update.
  glide(from, began, number) {
    if (!this.follows || this.hovered || number !== this.glides) return;
    const share = movesSmoothly ? Math.min((performance.now() - began) / GLIDE_MILLISECONDS, 1) : 1;
    const end = from + (this.ends - from) * share;
    [this.begin, this.end] = [end - this.span, end];
    if (this.selected) this.show(this.selected);
    this.redraw();
    if (share < 1) requestAnimationFrame(() => this.glide(from, began, number));
  },
});
