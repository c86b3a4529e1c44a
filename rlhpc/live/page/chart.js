// Line chart on a canvas: axes, bands, a crosshair that all charts share, zoom by drag.

const LEFT = 58, RIGHT = 10, TOP = 8, BOTTOM = 26, TIP_MARGIN = 4, DOT = 2.6;

export const formatNumber = (value) => {
  if (typeof value !== "number" || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(2).replace("e+", "e");
  if (Number.isInteger(value)) return String(value);
  return String(Number(value.toPrecision(size >= 100 ? 5 : 4)));
};

const formatTick = (value) => {
  const size = Math.abs(value);
  if (size >= 1e9) return `${Number((value / 1e9).toPrecision(4))}G`;
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(4))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(4))}k`;
  return size > 0 && size < 1e-3 ? value.toExponential(0) : String(Number(value.toPrecision(4)));
};

// Round numbers between two ends, about `count` of them.
export const ticksBetween = (low, high, count) => {
  const raw = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw) ?? 10 * power;
  const ticks = [];
  for (let index = Math.ceil(low / step); index * step <= high + step * 1e-9 && ticks.length < 50; index += 1) ticks.push(index * step);
  return ticks;
};

const logTicks = (low, high) => {
  const ticks = [];
  for (let power = Math.ceil(Math.log10(low) - 1e-9); power <= Math.log10(high) + 1e-9; power += 1) ticks.push(10 ** power);
  return ticks.length >= 2 ? ticks : ticksBetween(low, high, 4);
};

const nearest = (xs, x) => {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle; else high = middle;
  }
  return Math.abs((xs[low] ?? Infinity) - x) <= Math.abs((xs[high] ?? Infinity) - x) ? low : high;
};

// Chart of one metric. `lines` are {name, color, x, y, low?, high?}; callbacks: zoom(low, high), hover(x or null).
export class Chart {
  constructor(canvas, tip, callbacks) {
    this.canvas = canvas;
    this.tip = tip;
    this.callbacks = callbacks;
    this.lines = [];
    this.isLog = false;
    this.range = [null, null];
    this.cursor = null;
    this.drag = null;
    this.frameRequest = 0;
    this.listen();
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  // Draws once before the next frame, however many pointer moves and answers come until then.
  draw() {
    cancelAnimationFrame(this.frameRequest);
    this.frameRequest = requestAnimationFrame(() => this.drawNow());
  }

  set(lines, {isLog, range}) {
    this.lines = lines;
    this.isLog = isLog;
    this.range = range;
    this.draw();
  }

  listen() {
    const position = (event) => event.clientX - this.canvas.getBoundingClientRect().left;
    this.canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      this.drag = [position(event), position(event)];
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (this.drag) this.drag[1] = position(event);
      if (this.frame) this.callbacks.hover(this.frame.toX(position(event)));
      this.draw();
    });
    this.canvas.addEventListener("pointerup", () => {
      const drag = this.drag;
      this.drag = null;
      if (drag && this.frame && Math.abs(drag[1] - drag[0]) > 8) {
        const ends = drag.map((pixel) => this.frame.toX(pixel)).sort((a, b) => a - b);
        this.callbacks.zoom(ends[0], ends[1]);
      } else this.draw();
    });
    this.canvas.addEventListener("pointercancel", () => { this.drag = null; this.draw(); });
    this.canvas.addEventListener("pointerleave", () => this.callbacks.hover(null));
    this.canvas.addEventListener("dblclick", () => this.callbacks.zoom(null, null));
    this.canvas.addEventListener("blur", () => this.callbacks.hover(null));
    this.canvas.addEventListener("keydown", (event) => {
      if (!this.frame || event.ctrlKey || event.metaKey || event.altKey || !this.press(event.key)) return;
      event.preventDefault();
      event.stopPropagation();
    });
  }

  // Does what a key asks for: moves the pointer by a fiftieth of the chart, or zooms around it. Returns whether it does anything.
  press(key) {
    const {left, right} = this.frame, length = right - left;
    const at = this.cursor !== null && this.cursor >= left && this.cursor <= right ? this.cursor : (left + right) / 2;
    const factor = {"+": 0.25, "=": 0.25, "-": 1}[key], step = {ArrowLeft: -0.02, ArrowRight: 0.02}[key];
    if (step) this.callbacks.hover(Math.min(Math.max(at + step * length, left), right));
    else if (factor) this.callbacks.zoom(at - factor * length, at + factor * length);
    else if (key === "Escape") this.callbacks.hover(null);
    return Boolean(step || factor || key === "Escape");
  }

  point(x) {
    this.cursor = x;
    this.draw();
  }

  measure(width, height) {
    const usable = (value) => value !== null && (!this.isLog || value > 0);
    let [left, right] = this.range, low = Infinity, high = -Infinity, first = Infinity, last = -Infinity;
    let bandLow = Infinity, bandHigh = -Infinity;
    for (const line of this.lines) {
      for (let index = 0; index < line.x.length; index += 1) {
        const x = line.x[index];
        first = Math.min(first, x);
        last = Math.max(last, x);
        if ((left !== null && x < left) || (right !== null && x > right)) continue;
        if (usable(line.y[index])) {
          low = Math.min(low, line.y[index]);
          high = Math.max(high, line.y[index]);
        }
        if (line.low && usable(line.low[index])) bandLow = Math.min(bandLow, line.low[index]);
        if (line.high && usable(line.high[index])) bandHigh = Math.max(bandHigh, line.high[index]);
      }
    }
    left ??= first;
    right ??= last;
    if (!(right > left)) { left -= 0.5; right += 0.5; }
    if (low > high) return null;
    const scale = this.isLog ? Math.log10 : (value) => value;
    let bottom = scale(low), top = scale(high);
    // The interval of two seeds is many times as wide as their distance; it ends at the chart's edge, so that the lines stay readable.
    const reach = top - bottom || Math.abs(top) || 1;
    if (bandLow < low) bottom = Math.max(scale(bandLow), bottom - reach);
    if (bandHigh > high) top = Math.min(scale(bandHigh), top + reach);
    const margin = (top - bottom) * 0.06 || Math.abs(top) * 0.1 || 1;
    bottom -= margin;
    top += margin;
    const plotWidth = width - LEFT - RIGHT, plotHeight = height - TOP - BOTTOM;
    return {
      left, right, low: this.isLog ? 10 ** bottom : bottom, high: this.isLog ? 10 ** top : top, width, height,
      px: (x) => LEFT + ((x - left) / (right - left)) * plotWidth,
      py: (y) => TOP + (1 - (scale(y) - bottom) / (top - bottom)) * plotHeight,
      toX: (pixel) => left + (Math.min(Math.max(pixel, LEFT), width - RIGHT) - LEFT) / plotWidth * (right - left),
      usable,
    };
  }

  drawNow() {
    const box = this.canvas.getBoundingClientRect(), ratio = devicePixelRatio || 1;
    if (!box.width) return;
    this.canvas.width = Math.round(box.width * ratio);
    this.canvas.height = Math.round(box.height * ratio);
    const context = this.canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, box.width, box.height);
    context.font = "12px system-ui, sans-serif";
    context.fillStyle = color("--muted");
    this.frame = this.measure(box.width, box.height);
    this.canvas.dataset.points = String(this.lines.reduce((sum, line) => sum + line.x.length, 0));
    if (!this.frame) {
      context.textAlign = "center";
      context.fillText("no numbers yet", box.width / 2, box.height / 2);
      this.tip.hidden = true;
      return;
    }
    this.canvas.dataset.range = `${this.frame.left} ${this.frame.right}`;
    this.drawAxes(context, color);
    context.save();
    context.beginPath();
    context.rect(LEFT - DOT, TOP - DOT, box.width - LEFT - RIGHT + 2 * DOT, box.height - TOP - BOTTOM + 2 * DOT);
    context.clip();
    for (const line of this.lines) {
      this.drawMarks(context, line, color(line.color));
      this.drawLine(context, line, color(line.color));
    }
    context.restore();
    this.drawPointer(context, color);
  }

  // Draws a dashed line where a run was resumed with another configuration.
  drawMarks(context, line, color) {
    context.strokeStyle = color;
    context.lineWidth = 1;
    context.setLineDash([4, 4]);
    for (const mark of line.marks ?? []) {
      const x = this.frame.px(mark.x);
      context.beginPath();
      context.moveTo(x, TOP);
      context.lineTo(x, this.frame.height - BOTTOM);
      context.stroke();
    }
    context.setLineDash([]);
  }

  drawAxes(context, color) {
    const {left, right, low, high, width, height, px, py} = this.frame;
    context.strokeStyle = color("--line");
    context.lineWidth = 1;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const tick of this.isLog ? logTicks(low, high) : ticksBetween(low, high, 5)) {
      const y = py(tick);
      context.beginPath();
      context.moveTo(LEFT, y);
      context.lineTo(width - RIGHT, y);
      context.stroke();
      context.fillText(formatTick(tick), LEFT - 6, y);
    }
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const tick of ticksBetween(left, right, Math.max(2, width / 80))) {
      const text = formatTick(tick), half = context.measureText(text).width / 2;
      context.fillText(text, Math.min(px(tick), width - half), height - BOTTOM + 7);
    }
  }

  drawLine(context, line, stroke) {
    const {px, py, usable} = this.frame;
    if (line.low && line.high) {
      context.beginPath();
      line.x.forEach((x, index) => { if (usable(line.high[index])) context.lineTo(px(x), py(line.high[index])); });
      for (let index = line.x.length - 1; index >= 0; index -= 1) if (usable(line.low[index])) context.lineTo(px(line.x[index]), py(line.low[index]));
      context.globalAlpha = 0.18;
      context.fillStyle = stroke;
      context.fill();
      context.globalAlpha = 1;
    }
    context.beginPath();
    context.strokeStyle = stroke;
    context.lineWidth = 1.6;
    let isDrawing = false;
    line.x.forEach((x, index) => {
      const y = line.y[index];
      if (!usable(y)) { isDrawing = false; return; }
      if (isDrawing) context.lineTo(px(x), py(y)); else context.moveTo(px(x), py(y));
      isDrawing = true;
    });
    context.stroke();
    if (line.x.length <= 40) {
      context.fillStyle = stroke;
      line.x.forEach((x, index) => {
        if (!usable(line.y[index])) return;
        context.beginPath();
        context.arc(px(x), py(line.y[index]), DOT, 0, 7);
        context.fill();
      });
    }
  }

  drawPointer(context, color) {
    const {px, height, left, right, width} = this.frame;
    if (this.drag) {
      context.fillStyle = color("--focus");
      context.globalAlpha = 0.15;
      context.fillRect(Math.min(...this.drag), TOP, Math.abs(this.drag[1] - this.drag[0]), height - TOP - BOTTOM);
      context.globalAlpha = 1;
    }
    const isInside = this.cursor !== null && this.cursor >= left && this.cursor <= right;
    this.tip.hidden = !isInside;
    if (!isInside) return;
    const x = px(this.cursor);
    context.strokeStyle = color("--muted");
    context.beginPath();
    context.moveTo(x, TOP);
    context.lineTo(x, height - BOTTOM);
    context.stroke();
    const values = this.lines.filter((line) => line.x.length).map((line) => ({line, index: nearest(line.x, this.cursor)}));
    values.sort((a, b) => (b.line.y[b.index] ?? -Infinity) - (a.line.y[a.index] ?? -Infinity));
    this.tip.replaceChildren(...values.slice(0, 12).map(({line, index}) => {
      const row = document.createElement("div"), swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.background = `var(${line.color})`;
      const band = line.low ? ` (${formatNumber(line.low[index])} … ${formatNumber(line.high[index])})` : "";
      row.append(swatch, `${formatNumber(line.y[index])}${band} at ${formatNumber(line.x[index])}  ${line.name}`);
      return row;
    }));
    this.tip.style.top = `${TOP + 34}px`;
    // Beside the pointer, but within the figure: what lies outside it, other parts of the page would cover.
    const beside = x < width / 2 ? x + 22 : x + 2 - this.tip.offsetWidth;
    const last = this.tip.parentElement.clientWidth - this.tip.offsetWidth - TIP_MARGIN;
    this.tip.style.left = `${Math.max(TIP_MARGIN, Math.min(beside, last))}px`;
  }
}
