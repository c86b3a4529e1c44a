// Timeline of a traced step on a canvas. Names of spans come from the run: they are drawn, or set as text, and never become HTML.
(() => {
  const data = JSON.parse(document.getElementById("timeline-data").textContent);
  const colors = JSON.parse(document.getElementById("timeline-colors").textContent);
  const root = document.getElementById("timeline"), tip = document.getElementById("timeline-tip");
  const status = document.getElementById("timeline-status"), axis = document.getElementById("timeline-axis");
  const canvas = document.getElementById("timeline-canvas"), scroll = document.getElementById("timeline-scroll");
  const LANE = 16, GAP = 7, COUNTER = 26, MIN_RANGE = 2;
  const text = (number) => (number < 0 ? "" : data.texts[number]);
  const view = {low: 0, high: Math.max(data.length, 1)};
  const state = {selected: null, hover: null, drag: null, isPathShown: true};

  const formatTime = (microseconds) => {
    const size = Math.abs(microseconds);
    if (size >= 1e6) return `${Number((microseconds / 1e6).toPrecision(4))} s`;
    return size >= 1e3 ? `${Number((microseconds / 1e3).toPrecision(4))} ms` : `${Number(microseconds.toPrecision(3))} µs`;
  };

  const formatValue = ({points, unit}) => {
    const largest = Math.max(...points.map((point) => point[1]));
    const [scale, prefix] = [[1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]].find(([size]) => largest >= size) ?? [1, ""];
    return `${Number((largest / scale).toPrecision(3))} ${prefix}${unit}`.trim();
  };

  // ---- rows: the threads of each track, and its counters, from top to bottom ----
  const rows = [], tracks = [];
  let height = GAP;
  data.tracks.forEach((track, number) => {
    const top = height;
    track.rows.forEach((row, index) => {
      const rowHeight = LANE * row.depth;
      rows.push({track: number, row, top: height, height: rowHeight, label: index ? row.thread : track.name, isFirst: !index});
      height += rowHeight + 2;
    });
    if (!track.rows.length) {
      rows.push({track: number, row: {spans: [], depth: 1, thread: ""}, top: height, height: LANE, label: track.name, isFirst: true});
      height += LANE + 2;
    }
    for (const counter of track.counters) {
      rows.push({track: number, counter, top: height, height: COUNTER, label: `${counter.name} ≤ ${formatValue(counter)}`, isFirst: false});
      height += COUNTER + 2;
    }
    tracks.push({top, height: height - top});
    height += GAP;
  });
  canvas.style.height = `${height}px`;

  const left = () => Math.min(150, Math.max(74, canvas.clientWidth * 0.2));
  const toX = (time) => left() + ((time - view.low) / (view.high - view.low)) * (canvas.clientWidth - left());
  const toTime = (x) => view.low + (Math.max(0, x - left()) / (canvas.clientWidth - left())) * (view.high - view.low);

  const setView = (low, high) => {
    const range = Math.min(Math.max(high - low, MIN_RANGE), data.length || 1);
    view.low = Math.min(Math.max(0, low), Math.max(0, data.length - range));
    view.high = view.low + range;
    draw();
  };
  const zoom = (factor, center = (view.low + view.high) / 2) => setView(center - (center - view.low) * factor, center + (view.high - center) * factor);
  const pan = (share) => setView(view.low + share * (view.high - view.low), view.high + share * (view.high - view.low));

  // ---- drawing ----
  const style = () => {
    const values = getComputedStyle(document.documentElement);
    return (name) => values.getPropertyValue(name).trim();
  };
  const fit = (element) => {
    const ratio = Math.min(devicePixelRatio || 1, 16000 / Math.max(1, element.clientHeight));
    element.width = Math.round(element.clientWidth * ratio);
    element.height = Math.round(element.clientHeight * ratio);
    const context = element.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, element.clientWidth, element.clientHeight);
    context.font = "11.5px system-ui, sans-serif";
    context.textBaseline = "middle";
    return context;
  };
  const ticks = (count) => {
    const raw = (view.high - view.low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw), found = [];
    for (let time = Math.ceil(view.low / step) * step; time <= view.high && found.length < 50; time += step) found.push(time);
    return found;
  };
  const clip = (context, words, width) => {
    if (context.measureText(words).width <= width) return words;
    let length = Math.min(words.length, Math.floor(width / 4));
    while (length > 1 && context.measureText(`${words.slice(0, length)}…`).width > width) length -= 1;
    return length > 1 ? `${words.slice(0, length)}…` : "";
  };

  const draw = () => {
    const color = style(), width = canvas.clientWidth;
    const times = ticks(Math.max(2, (width - left()) / 85)), axisContext = fit(axis), context = fit(canvas);
    axisContext.fillStyle = color("--muted");
    axisContext.textAlign = "center";
    context.strokeStyle = color("--line");
    for (const time of times) {
      const x = toX(time);
      if (x > left() + 20 && x < width - 24) axisContext.fillText(formatTime(time), x, 11);
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, height);
      context.stroke();
    }
    for (const row of rows) row.counter ? drawCounter(context, row, color) : drawSpans(context, row, color);
    context.fillStyle = color("--panel");
    context.fillRect(0, 0, left() - 2, height);
    for (const row of rows) {
      context.fillStyle = color(row.isFirst ? "--ink" : "--muted");
      context.textAlign = "left";
      context.fillText(clip(context, row.label, left() - 8), 2, row.top + Math.min(row.height, LANE) / 2 + 1);
    }
    if (state.isPathShown) drawPath(context, color);
    if (state.drag) {
      context.fillStyle = color("--c0");
      context.globalAlpha = 0.18;
      context.fillRect(Math.min(...state.drag), 0, Math.abs(state.drag[1] - state.drag[0]), height);
      context.globalAlpha = 1;
    }
    canvas.dataset.range = `${view.low} ${view.high}`;
    canvas.dataset.tracks = String(data.tracks.length);
  };

  const drawSpans = (context, row, color) => {
    const width = canvas.clientWidth, edges = new Array(row.row.depth).fill(-1);
    for (const span of row.row.spans) {
      if (span[0] > view.high) break;
      if (span[1] < view.low) continue;
      const from = Math.max(toX(span[0]), left() - 2), to = Math.min(toX(span[1]), width + 2), lane = span[2];
      if (to <= edges[lane] + 0.4) continue;
      edges[lane] = to;
      const category = text(span[3]), y = row.top + lane * LANE, size = Math.max(0.6, to - from - (to - from > 3 ? 0.7 : 0));
      const isChosen = span === state.selected?.span || span === state.hover?.span;
      context.fillStyle = color(colors[category] ?? "--soft");
      context.globalAlpha = colors[category] ? 0.9 : 1;
      context.fillRect(from, y, size, LANE - 2);
      context.globalAlpha = 1;
      if (!colors[category] && size > 2) {
        context.strokeStyle = color("--line");
        context.strokeRect(from + 0.5, y + 0.5, size - 1, LANE - 3);
      }
      if (isChosen) {
        context.strokeStyle = color("--ink");
        context.lineWidth = 2;
        context.strokeRect(from, y, size, LANE - 2);
        context.lineWidth = 1;
      }
      if (size > 34) {
        context.fillStyle = color(colors[category] ? "--bg" : "--muted");
        context.textAlign = "left";
        context.fillText(clip(context, text(span[4]) || category, size - 8), from + 4, y + LANE / 2 - 0.5);
      }
    }
  };

  const drawCounter = (context, row, color) => {
    const values = row.counter.points.map((point) => point[1]), top = Math.max(...values, 1e-12);
    context.fillStyle = color("--muted");
    context.globalAlpha = 0.35;
    row.counter.points.forEach(([time, value], index) => {
      const next = row.counter.points[index + 1]?.[0] ?? data.length, bar = (value / top) * (COUNTER - 4);
      const from = Math.max(toX(time), left());
      if (toX(next) > from) context.fillRect(from, row.top + COUNTER - 2 - bar, Math.max(0.6, toX(next) - from), bar);
    });
    context.globalAlpha = 1;
  };

  const drawPath = (context, color) => {
    context.strokeStyle = color("--ink");
    context.lineWidth = 2;
    let last = null;
    for (const [start, end, number] of data.path) {
      if (end < view.low || start > view.high || number < 0) { last = null; continue; }
      const y = tracks[number].top - 2.5, from = Math.max(toX(start), left()), to = toX(end);
      context.beginPath();
      if (last !== null && last !== y) { context.moveTo(from, last); context.lineTo(from, y); } else context.moveTo(from, y);
      context.lineTo(to, y);
      context.stroke();
      last = y;
    }
    context.lineWidth = 1;
  };

  // ---- finding and describing spans ----
  const find = (x, y) => {
    const time = toTime(x), slack = (2 / (canvas.clientWidth - left())) * (view.high - view.low);
    if (x < left()) return null;
    for (const row of rows) {
      if (row.counter || y < row.top || y >= row.top + row.height) continue;
      const lane = Math.floor((y - row.top) / LANE);
      let nearest = null;
      for (const span of row.row.spans) {
        if (span[0] > time + slack) break;
        if (span[2] === lane && span[1] >= time - slack) nearest = span;
        if (nearest && span[0] <= time && time <= span[1] && span[2] === lane) break;
      }
      if (nearest) return {row, span: nearest};
    }
    return null;
  };
  const describe = ({row, span}) => {
    const details = [data.tracks[row.track].name, data.tracks[row.track].host, row.row.thread === "main" ? "" : row.row.thread, text(span[5])];
    return `${text(span[4])} (${text(span[3])}): ${formatTime(span[1] - span[0])} from ${formatTime(span[0])}; ${details.filter(Boolean).join(", ")}`;
  };
  const select = (found) => {
    state.selected = found;
    status.textContent = found ? describe(found) : "";
    if (found) {
      const {span, row} = found, top = row.top + span[2] * LANE;
      if (span[1] < view.low || span[0] > view.high) {
        const half = (view.high - view.low) / 2, middle = (span[0] + span[1]) / 2;
        setView(middle - half, middle + half);
      }
      if (top < scroll.scrollTop || top + LANE > scroll.scrollTop + scroll.clientHeight) scroll.scrollTop = top - scroll.clientHeight / 2;
    }
    draw();
  };
  const spanRows = rows.filter((row) => row.row && row.row.spans.length);
  const step = (offset) => {
    const row = state.selected?.row ?? spanRows[0];
    if (!row) return;
    const spans = row.row.spans, index = state.selected ? spans.indexOf(state.selected.span) + offset : spans.findIndex((span) => span[1] >= view.low);
    if (spans[index]) select({row, span: spans[index]});
  };
  const moveRow = (offset) => {
    if (!spanRows.length) return;
    const row = spanRows[Math.min(Math.max((state.selected ? spanRows.indexOf(state.selected.row) : -1) + offset, 0), spanRows.length - 1)];
    const time = state.selected ? state.selected.span[0] : view.low;
    select({row, span: row.row.spans.find((span) => span[1] >= time) ?? row.row.spans.at(-1)});
  };

  // ---- pointer and keys ----
  const position = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  const showTip = (event, found) => {
    tip.hidden = !found;
    if (!found) return;
    tip.textContent = describe(found);
    const box = root.getBoundingClientRect(), x = event.clientX - box.left;
    tip.style.top = `${event.clientY - box.top + 16}px`;
    tip.style.left = x < box.width / 2 ? `${x + 8}px` : "auto";
    tip.style.right = x < box.width / 2 ? "auto" : `${box.width - x + 8}px`;
  };
  canvas.addEventListener("pointerdown", (event) => {
    const [x] = position(event);
    if (event.button !== 0 || x < left()) return;
    state.drag = [x, x];
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = position(event);
    if (state.drag) { state.drag[1] = Math.max(x, left()); tip.hidden = true; draw(); return; }
    const found = find(x, y);
    if (found?.span !== state.hover?.span) { state.hover = found; draw(); }
    showTip(event, found);
  });
  canvas.addEventListener("pointerup", (event) => {
    const drag = state.drag;
    state.drag = null;
    if (drag && Math.abs(drag[1] - drag[0]) > 8) {
      const times = drag.map(toTime).sort((a, b) => a - b);
      setView(times[0], times[1]);
    } else if (drag) select(find(...position(event)));
  });
  canvas.addEventListener("pointercancel", () => { state.drag = null; draw(); });
  canvas.addEventListener("pointerleave", () => { state.hover = null; tip.hidden = true; draw(); });
  canvas.addEventListener("dblclick", () => setView(0, data.length));
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) zoom(event.deltaY > 0 ? 1.25 : 0.8, toTime(position(event)[0]));
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(Math.sign(event.deltaX || event.deltaY) * 0.1);
    else return;
    event.preventDefault();
  }, {passive: false});
  const togglePath = () => {
    state.isPathShown = !state.isPathShown;
    document.getElementById("timeline-path").setAttribute("aria-pressed", String(state.isPathShown));
    draw();
  };
  const KEYS = {
    ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), ArrowUp: () => moveRow(-1), ArrowDown: () => moveRow(1),
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => setView(0, data.length), n: () => step(1), p: () => step(-1),
    c: togglePath, Escape: () => select(null),
    Enter: () => { if (state.selected) { const [start, end] = state.selected.span; setView(start - (end - start) * 0.1, end + (end - start) * 0.1); } },
  };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  for (const [id, action] of [["in", () => zoom(0.5)], ["out", () => zoom(2)], ["whole", () => setView(0, data.length)], ["path", togglePath]]) {
    document.getElementById(`timeline-${id}`).addEventListener("click", action);
  }
  new ResizeObserver(draw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
