// The pages of rlhpc serve. Whatever a run has written enters the page as text (textContent), never as HTML.
import {Chart, formatNumber} from "/chart.js";

const byId = (id) => document.getElementById(id);
const COLORS = 8;
const LIVE_MS = 3000, IDLE_MS = 15000, SETTLE_MS = 80;
const X_AXES = [
  ["step", "step"], ["rollout/env_steps", "env steps"], ["rollout/samples", "responses"], ["train/samples", "demonstrated steps"],
  ["train/tokens_total", "tokens"], ["time/wall_s", "training seconds"],
];
const COLUMNS = [
  ["name", "run", "text"], ["state", "state", "text"], ["step", "step"], ["return", "return"], ["reward", "reward"], ["loss", "loss"],
  ["env_steps_per_s", "env steps/s"], ["tokens_per_s", "tokens/s"], ["elapsed_s", "trained"], ["eta_s", "left"],
];
const TABS = [
  ["curves", "Curves"], ["samples", "Samples"], ["media", "Videos"], ["logs", "Logs"], ["report", "Report"], ["config", "Configuration"],
  ["steps", "Steps"],
];

// Creates an element with properties and children; strings become text.
const make = (tag, properties = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
};

const duration = (seconds) => {
  if (!Number.isFinite(seconds) || seconds < 0) return "–";
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  if (hours) return `${hours}h${String(minutes % 60).padStart(2, "0")}m`;
  return minutes ? `${minutes}m${String(Math.floor(seconds % 60)).padStart(2, "0")}s` : `${Math.floor(seconds)}s`;
};

class Failure extends Error {}

// Asks the server for a JSON value; parameters that are arrays are repeated. A signal can end the request.
const ask = async (path, parameters = {}, signal = undefined) => {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const item of Array.isArray(value) ? value : [value]) if (item !== null && item !== undefined && item !== "") query.append(name, item);
  }
  let response, value;
  try {
    response = await fetch(`${path}?${query}`, {signal});
    value = await response.json();
  } catch {
    if (signal?.aborted) throw new Failure("replaced by a later request");
    throw new Failure("rlhpc serve does not answer; is it, and the ssh connection, still there?");
  }
  if (!response.ok) throw new Failure(value.error);
  return value;
};

const address = (path, parameters) => `${path}?${new URLSearchParams(parameters)}`;

// ---- state, kept in the address so that a view can be bookmarked ----
const state = {
  runs: [], chosen: [], filter: "", sort: "name", descending: false, tab: "curves", current: "",
  metrics: null, names: [], x: "step", smoothing: 0.02, isLog: false, isGrouped: false, range: [null, null],
  sample: {samples: "", text: "", verdict: "", min_reward: "", max_reward: "", start: 0}, log: "driver", step: null, pickerOpen: false,
};

const save = () => {
  const values = {
    runs: state.chosen.join("\n"), tab: state.tab, filter: state.filter, sort: state.sort, down: state.descending ? "1" : "",
    metrics: (state.metrics ?? []).join("\n"), x: state.x, smooth: String(state.smoothing), log: state.isLog ? "1" : "",
    grouped: state.isGrouped ? "1" : "", low: state.range[0] ?? "", high: state.range[1] ?? "",
  };
  const query = new URLSearchParams(Object.entries(values).filter(([, value]) => value !== ""));
  history.replaceState(null, "", `#${query}`);
};

const restore = () => {
  const query = new URLSearchParams(location.hash.slice(1));
  if (query.get("runs")) state.chosen = query.get("runs").split("\n");
  if (query.get("metrics")) state.metrics = query.get("metrics").split("\n");
  state.filter = query.get("filter") ?? "";
  state.sort = query.get("sort") ?? "name";
  state.descending = query.get("down") === "1";
  state.tab = TABS.some(([name]) => name === query.get("tab")) ? query.get("tab") : "curves";
  state.x = query.get("x") ?? "step";
  state.smoothing = Number(query.get("smooth") ?? 0.02) || 0;
  state.isLog = query.get("log") === "1";
  state.isGrouped = query.get("grouped") === "1";
  state.range = ["low", "high"].map((name) => (query.get(name) ? Number(query.get(name)) : null));
  byId("filter").value = state.filter;
};

// ---- table of runs ----
const matches = (row, text) => text.trim().split(/\s+/).filter(Boolean).every((word) => {
  const comparison = /^([\w]+)([<>])=?(-?[\d.e+-]+)$/i.exec(word);
  if (comparison) {
    const value = row[comparison[1]], limit = Number(comparison[3]);
    return typeof value === "number" && (comparison[2] === ">" ? value >= limit : value <= limit);
  }
  const [key, ...rest] = word.split(":");
  if (rest.length && ["name", "state", "sweep", "label", "reason", "job", "seed"].includes(key)) {
    return String(row[key] ?? "").toLowerCase().includes(rest.join(":").toLowerCase());
  }
  return `${row.name} ${row.state} ${row.label} ${row.reason}`.toLowerCase().includes(word.toLowerCase());
});

const listed = () => {
  const rows = state.runs.filter((row) => matches(row, state.filter)), sign = state.descending ? -1 : 1;
  return rows.sort((a, b) => {
    const [left, right] = [a[state.sort], b[state.sort]];
    if (typeof left === "number" || typeof right === "number") {
      if (typeof left !== "number") return 1;
      if (typeof right !== "number") return -1;
      return sign * (left - right) || a.name.localeCompare(b.name);
    }
    return sign * String(left ?? "").localeCompare(String(right ?? ""), undefined, {numeric: true}) || a.name.localeCompare(b.name);
  });
};

const colorOf = (name) => `--c${Math.max(0, state.chosen.indexOf(name)) % COLORS}`;

const cell = (row, key) => {
  if (key === "step") return row.max_steps >= 0 && row.step !== undefined ? `${row.step}/${row.max_steps}` : formatNumber(row.step);
  if (key === "elapsed_s") return duration(row.elapsed_s);
  if (key === "eta_s") return row.state === "running" ? duration(row.eta_s) : "–";
  return formatNumber(row[key]);
};

// What a run waits for, or why it ended, where its state does not say so; a phone has no pointer to ask with.
const reasonOf = (row) => (row.reason && !["running", "finished"].includes(row.state) ? make("div", {class: "reason"}, row.reason) : null);

const drawTable = () => {
  const rows = listed(), shown = COLUMNS.filter(([key, , kind]) => kind || state.runs.some((row) => typeof row[key] === "number"));
  byId("count").textContent = `${rows.length} of ${state.runs.length}, ${state.chosen.length} chosen`;
  const focused = document.activeElement?.dataset.column;
  byId("table").tHead.replaceChildren(make("tr", {}, ...shown.map(([key, title, kind]) => make("th", {
    class: kind ?? "", scope: "col", tabIndex: 0, "data-column": key, "aria-sort": state.sort === key ? (state.descending ? "descending" : "ascending") : "none",
    onclick: () => sortBy(key), onkeydown: (event) => { if (event.key === "Enter") sortBy(key); },
  }, title + (state.sort === key ? (state.descending ? " ▾" : " ▴") : "")))));
  if (focused) byId("table").tHead.querySelector(`[data-column=${focused}]`)?.focus();
  byId("table").tBodies[0].replaceChildren(...rows.map((row) => {
    const isChosen = state.chosen.includes(row.name), swatch = make("span", {class: "swatch"});
    if (isChosen) swatch.style.background = `var(${colorOf(row.name)})`;
    const cells = shown.map(([key, , kind]) => {
      if (key === "name") return make("td", {class: "text name", title: row.name + (row.label ? `\n${row.label}` : "")}, swatch, row.name);
      if (key === "state") return make("td", {class: "text", title: row.reason}, make("span", {class: `state ${row.state}`}, row.state), reasonOf(row));
      return make("td", {class: kind ?? ""}, cell(row, key));
    });
    const line = make("tr", {class: row.name === state.current ? "current" : "", onclick: () => choose(row.name)}, ...cells);
    line.setAttribute("aria-selected", String(isChosen));
    line.dataset.name = row.name;
    return line;
  }));
};

const sortBy = (key) => {
  state.descending = state.sort === key ? !state.descending : key !== "name" && key !== "state";
  state.sort = key;
  changed({view: false});
};

const choose = (name) => {
  state.current = name;
  state.chosen = state.chosen.includes(name) ? state.chosen.filter((other) => other !== name) : [...state.chosen, name];
  changed();
};

// The run that the tabs of a single run show: the one chosen last.
const single = () => (state.chosen.includes(state.current) ? state.current : state.chosen.at(-1) ?? "");

// ---- tabs ----
byId("tabs").append(...TABS.map(([name, title], index) => make("button", {
  type: "button", role: "tab", title: `${index + 1}`, id: `tab-${name}`, onclick: () => { state.tab = name; changed(); },
}, title)));
const drawTabs = () => { for (const [name] of TABS) byId(`tab-${name}`).setAttribute("aria-selected", String(state.tab === name)); };

let drawing = 0;
let requests = new AbortController();
let isSampled = false;
let settling = 0;
let charts = new Map();
let curveTools = null;

const changed = ({view = true} = {}) => {
  save();
  drawTable();
  drawTabs();
  if (view) showView();
};

const showView = async () => {
  drawing += 1;
  requests.abort();
  requests = new AbortController();
  isSampled = false;
  const own = drawing, view = byId("view");
  if (state.tab !== "curves") { charts = new Map(); curveTools = null; }
  if (!state.chosen.length) {
    charts = new Map();
    curveTools = null;
    view.replaceChildren(make("p", {class: "note"}, state.runs.length ? "Choose runs on the left." : "No runs here yet: the table fills as soon as one begins."));
    return;
  }
  try {
    if (state.tab === "curves") await drawCurves(own);
    else {
      const content = await VIEWS[state.tab](single());
      if (own === drawing && content) view.replaceChildren(...content);
    }
    if (own === drawing) byId("connection").textContent = "";
    if (isSampled) schedule();
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    if (own === drawing) view.replaceChildren(make("p", {class: "problem"}, error.message));
  }
};

// ---- curves ----
const drawCurves = async (own) => {
  const {names, first} = await ask("/api/metrics", {run: state.chosen}, requests.signal);
  if (own !== drawing) return;
  const metrics = state.metrics ?? first;
  const isNew = curveTools === null || JSON.stringify(names) !== JSON.stringify(state.names);
  state.names = names;
  const view = byId("view");
  if (isNew) {
    charts = new Map();
    curveTools = curveBar(names, first);
    view.replaceChildren(curveTools, make("p", {class: "note", id: "sampled"}), make("div", {class: "legend", id: "legend"}), make("div", {class: "charts", id: "charts"}));
  }
  const grid = byId("charts");
  for (const [name, entry] of charts) if (!metrics.includes(name)) { entry.figure.remove(); charts.delete(name); }
  for (const name of metrics) if (!charts.has(name)) charts.set(name, newChart(name));
  const wanted = metrics.map((name) => charts.get(name).figure);
  if (wanted.some((figure, index) => grid.children[index] !== figure)) grid.replaceChildren(...wanted);
  await Promise.all(metrics.map((name) => fillChart(name, own)));
};

const fillChart = async (name, own) => {
  const lines = await ask("/api/curves", {
    run: state.chosen, metric: name, x: state.x, smoothing: state.smoothing, low: state.range[0], high: state.range[1], grouped: state.isGrouped ? "1" : "",
  }, requests.signal);
  const entry = charts.get(name);
  if (own !== drawing || !entry) return;
  const sampledRuns = lines.filter((line) => line.is_sample).length;
  isSampled ||= sampledRuns > 0;
  byId("sampled").textContent = sampledRuns ? `${sampledRuns} of ${lines.length} curves are drawn from a sample of their rows while these are read.` : "";
  const colored = lines.map((line) => ({...line, color: colorOf(line.runs[0])}));
  entry.chart.set(colored, {isLog: state.isLog, range: state.range});
  byId("legend").replaceChildren(...colored.map((line) => {
    const swatch = make("span", {class: "swatch"});
    swatch.style.background = `var(${line.color})`;
    const text = line.runs.length > 1 ? `${line.name} (${line.runs.length} runs that differ only in their seeds; band: 95 % interval of the mean)` : line.name;
    const resumes = line.marks.map((mark) => make("span", {class: "note"}, ` ┆ ${mark.text}`));
    return make("span", {}, swatch, text, ...resumes);
  }));
};

const newChart = (name) => {
  const canvas = make("canvas", {role: "img", tabIndex: 0, "aria-label": `${name}: ← → values, + − zoom`}), tip = make("div", {class: "tip", hidden: true});
  const remove = make("button", {type: "button", title: `hide ${name}`, onclick: () => {
    state.metrics = (state.metrics ?? [...charts.keys()]).filter((other) => other !== name);
    curveTools = null;
    changed();
  }}, "×");
  const figure = make("figure", {}, make("figcaption", {}, make("span", {}, name), remove), canvas, tip);
  figure.dataset.metric = name;
  const chart = new Chart(canvas, tip, {
    zoom: (low, high) => { state.range = [low, high]; changed(); },
    hover: (x) => { for (const entry of charts.values()) entry.chart.point(x); },
  });
  return {figure, chart};
};

const curveBar = (names, first) => {
  const axes = X_AXES.filter(([name]) => name === "step" || names.includes(name));
  if (!axes.some(([name]) => name === state.x)) state.x = "step";
  const axis = make("select", {id: "x-axis", onchange: () => { state.x = axis.value; state.range = [null, null]; changed(); }},
    ...axes.map(([name, title]) => make("option", {value: name, selected: name === state.x}, title)));
  const smoothing = make("input", {id: "smoothing", type: "range", min: 0, max: 0.3, step: 0.01, value: state.smoothing,
    oninput: () => { state.smoothing = Number(smoothing.value); clearTimeout(settling); settling = setTimeout(changed, SETTLE_MS); }});
  const toggle = (id, title, key) => make("button", {id, type: "button", "aria-pressed": String(state[key]), onclick: (event) => {
    state[key] = !state[key];
    event.currentTarget.setAttribute("aria-pressed", String(state[key]));
    changed();
  }}, title);
  const search = make("input", {id: "metric-filter", type: "search", placeholder: "find a metric", oninput: () => {
    for (const label of list.children) label.hidden = !label.textContent.toLowerCase().includes(search.value.toLowerCase());
  }});
  const list = make("div", {class: "names"}, ...names.map((name) => make("label", {}, make("input", {
    type: "checkbox", checked: (state.metrics ?? first).includes(name), onchange: (event) => {
      const shown = state.metrics ?? first;
      state.metrics = event.target.checked ? [...shown, name] : shown.filter((other) => other !== name);
      changed();
    },
  }), ` ${name}`)));
  const picker = make("details", {id: "picker", open: state.pickerOpen, ontoggle: () => { state.pickerOpen = picker.open; }},
    make("summary", {}, `metrics (${names.length})`), search, list);
  return make("div", {}, make("div", {class: "bar"}, make("label", {}, "over", axis), make("label", {}, "smoothing", smoothing),
    toggle("log-axis", "log", "isLog"), toggle("grouped", "mean of seeds", "isGrouped"),
    make("button", {id: "zoom-out", type: "button", title: "the whole range (0); drag in a chart to zoom", onclick: () => { state.range = [null, null]; changed(); }}, "whole range")), picker);
};

// ---- samples ----
const field = (title, input) => make("label", {}, title, input);

// Images of a sample's prompt. An <img> runs no script of its file, and a file that is none shows its name.
const drawImages = (run, row) => {
  const files = Array.isArray(row.images) ? row.images : [];
  const left = (typeof row.num_images === "number" ? row.num_images : files.length) - files.length;
  if (!files.length && left <= 0) return null;
  const images = files.map((file) => make("img", {src: address("/media", {run, file}), alt: file.split("/").at(-1), loading: "lazy"}));
  return make("div", {class: "images"}, ...images, left > 0 ? make("span", {class: "note"}, `${left} more images of the prompt were not saved`) : null);
};

const drawSamples = async (run) => {
  const results = await ask("/api/evaluations", {run}), sample = state.sample;
  const withSamples = results.filter((result) => result.samples);
  if (!results.length) return [make("p", {class: "note"}, "No checkpoint of this run was evaluated yet: rlhpc eval, or the workflow's rule eval.")];
  const table = evaluationTable(results);
  if (!withSamples.length) return [table, make("p", {class: "note"}, "No evaluation of this run has samples.")];
  if (!withSamples.some((result) => result.samples === sample.samples)) Object.assign(sample, {samples: withSamples.at(-1).samples, start: 0});
  const output = make("div", {id: "samples"});
  let latest = 0;
  const refresh = async () => {
    const own = latest += 1; // an answer to an earlier question may come after that to a later one
    try {
      const {rows, matches: count, samples} = await ask("/api/samples", {run, ...sample, count: 20});
      if (own !== latest) return;
      const pages = make("p", {}, `${count} of ${samples} samples, from ${count ? sample.start + 1 : 0} `,
        make("button", {type: "button", disabled: sample.start === 0, onclick: () => { sample.start = Math.max(0, sample.start - 20); refresh(); }}, "earlier"), " ",
        make("button", {type: "button", id: "later", disabled: sample.start + 20 >= count, onclick: () => { sample.start += 20; refresh(); }}, "later"));
      output.replaceChildren(pages, ...rows.map((row) => drawSample(run, row)));
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      if (own === latest) output.replaceChildren(make("p", {class: "problem"}, error.message));
    }
  };
  const bound = (name, properties) => make("input", {value: sample[name], oninput: (event) => { sample[name] = event.target.value; sample.start = 0; refresh(); }, ...properties});
  const choice = make("select", {id: "evaluation", onchange: () => { Object.assign(sample, {samples: choice.value, start: 0}); refresh(); }},
    ...withSamples.map((result) => make("option", {value: result.samples, selected: result.samples === sample.samples}, `${result.suite}, step ${result.step}`)));
  const verdict = make("select", {id: "verdict", onchange: () => { Object.assign(sample, {verdict: verdict.value, start: 0}); refresh(); }},
    ...[["", "all"], ["right", "right"], ["wrong", "wrong"]].map(([value, title]) => make("option", {value, selected: value === sample.verdict}, title)));
  await refresh();
  return [table, make("div", {class: "bar"}, field("evaluation", choice), field("answers", verdict), field("reward from", bound("min_reward", {type: "number", step: "any"})),
    field("to", bound("max_reward", {type: "number", step: "any"})), bound("text", {id: "sample-text", type: "search", placeholder: "text in prompt, answer or tool call"})), output];
};

const evaluationTable = (results) => {
  const names = ["accuracy", "return_mean", "success_once", "success_at_end", "reward_mean", "n", "episodes"].filter((name) => results.some((result) => name in result.numbers));
  return make("div", {class: "scroll"}, make("table", {}, make("thead", {}, make("tr", {}, ...["suite", "step", ...names].map((name) => make("th", {}, name.replaceAll("_", " "))))),
    make("tbody", {}, ...results.map((result) => make("tr", {}, make("td", {}, result.suite), make("td", {}, String(result.step)),
      ...names.map((name) => make("td", {}, formatNumber(result.numbers[name]))))))));
};

const drawTokens = (pairs) => (Array.isArray(pairs) ? pairs : []).filter(Array.isArray).map(([text, logprob]) => {
  const token = make("span", {class: "token", title: `log-prob ${formatNumber(logprob)}`}, String(text));
  if (typeof logprob === "number") token.style.background = `color-mix(in srgb, var(--c3) ${Math.round(Math.min(1, Math.max(0, -logprob / 6)) * 60)}%, transparent)`;
  return token;
});

const drawSample = (run, row) => {
  const facts = [make("b", {}, `problem ${row.id}, sample ${row.sample}`), make("span", {class: row.right ? "right" : "wrong"}, row.right ? "✓ right" : "✗ wrong")];
  for (const name of ["reward", "tokens", "level", "answer"]) if (row[name] !== undefined) facts.push(make("span", {}, `${name} ${typeof row[name] === "number" ? formatNumber(row[name]) : JSON.stringify(row[name])}`));
  for (const [name, value] of Object.entries(row.terms ?? {})) facts.push(make("span", {}, `${name} ${typeof value === "number" ? formatNumber(value) : JSON.stringify(value)}`));
  const parts = [make("header", {}, ...facts), make("details", {}, make("summary", {}, "prompt"), make("pre", {}, row.prompt)), drawImages(run, row),
    make("div", {class: "note"}, "answer"), make("pre", {}, row.response)].filter(Boolean);
  if (Array.isArray(row.drawn)) parts.push(make("details", {}, make("summary", {}, "tokens, with the log-prob of each"), make("pre", {}, ...drawTokens(row.drawn))));
  if (Array.isArray(row.episode)) parts.push(make("details", {}, make("summary", {}, "turns, with the log-prob of each drawn token"), ...row.episode.flatMap(drawBranch)));
  return make("article", {}, ...parts);
};

const drawBranch = (branch) => (Array.isArray(branch?.parts) ? branch.parts : []).filter(Boolean).map((part) => {
  if (!Array.isArray(part.drawn)) return make("pre", {}, `${String(part.read ?? "")}`);
  return make("pre", {}, make("b", {}, `${branch.role ?? "assistant"}, turn ${part.turn}: `), ...drawTokens(part.drawn));
});

// ---- videos, logs, report, configuration ----
const drawMedia = async (run) => {
  const files = await ask("/api/media", {run});
  if (!files.length) return [make("p", {class: "note"}, "This run has no videos: env.eval.video_episodes records videos of evaluations, rlhpc play a checkpoint.")];
  return [make("div", {class: "media"}, ...files.map((file) => {
    const source = address("/media", {run, file});
    const content = file.endsWith(".mp4") ? make("video", {src: source, controls: true, preload: "metadata"}) : make("img", {src: source, alt: file, loading: "lazy"});
    return make("figure", {}, make("figcaption", {}, file), content);
  }))];
};

const drawLogs = async (run) => {
  const labels = await ask("/api/logs", {run});
  if (!labels.length) return [make("p", {class: "note"}, "This run has no logs.")];
  if (!labels.includes(state.log)) state.log = labels.includes("driver") ? "driver" : labels[0];
  const lines = await ask("/api/log", {run, label: state.log, lines: 1000});
  const view = byId("view"), follows = view.scrollHeight - view.scrollTop - view.clientHeight < 40, key = [run, ...labels].join("\n");
  if (follows) requestAnimationFrame(() => { view.scrollTop = view.scrollHeight; });
  const note = `last ${lines.length} lines of ${run}`, drawn = view.querySelector("pre.log");
  if (drawn?.dataset.key === key) { // new lines, without a new list to choose from under the pointer
    drawn.textContent = lines.join("\n");
    view.querySelector(".note").textContent = note;
    return null;
  }
  const choice = make("select", {id: "log", onchange: () => { state.log = choice.value; showView(); }},
    ...labels.map((label) => make("option", {value: label, selected: label === state.log}, label)));
  return [make("div", {class: "bar"}, field("rank", choice), make("span", {class: "note"}, note)),
    make("pre", {class: "log", "data-key": key}, lines.join("\n"))];
};

// Shows a page of the server, which may take seconds to draw, in a frame, with a note until it comes.
const drawFrame = (key, properties) => {
  const note = make("p", {class: "note"}, `The ${properties.title} is being drawn …`);
  const element = make("iframe", {...properties, onload: () => note.remove()});
  element.dataset.run = key;
  return [note, element];
};

const drawSteps = async (run) => {
  const rows = await ask("/api/steps", {run});
  if (!rows.length) return [make("p", {class: "note"}, `No step of ${run} was traced: train with runner.trace.steps=10-12, or record the next steps of a run that goes on with rlhpc trace RUN --steps 3.`)];
  if (!rows.some((row) => row.step === state.step)) state.step = rows.at(-1).step;
  const frame = byId("view").querySelector("iframe"), key = `${run}\n${state.step}`;
  const choice = make("select", {id: "step", onchange: () => { state.step = Number(choice.value); showView(); }}, ...rows.map((row) => make(
    "option", {value: row.step, selected: row.step === state.step},
    `step ${row.step}: ${row.length}${row.bottlenecks.length ? `, ${row.bottlenecks.join(", ")}` : ""}`)));
  if (frame && frame.dataset.run === key) return null;
  return [make("div", {class: "bar"}, field("step", choice)),
    ...drawFrame(key, {src: address("/step", {run, step: state.step}), title: `step ${state.step} of ${run}`, sandbox: "allow-scripts"})];
};

const drawReport = async (run) => {
  const frame = byId("view").querySelector("iframe");
  if (frame && frame.dataset.run === run) return null;
  return drawFrame(run, {src: address("/report", {run}), title: `report of ${run}`, sandbox: ""});
};

const drawConfig = async (run) => {
  const text = make("pre", {}, await ask("/api/config", {run}));
  if (state.chosen.length < 2) return [text];
  let differences;
  try {
    differences = drawDifferences(await ask("/api/differences", {run: state.chosen}));
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    differences = make("p", {class: "problem"}, error.message);
  }
  return [differences, make("p", {class: "note"}, `config.yaml of ${run}`), text];
};

const drawDifferences = ({runs, rows}) => make("div", {id: "differences"},
  make("p", {class: "note"}, `${rows.length} ${rows.length === 1 ? "key differs" : "keys differ"} between the ${runs.length < state.chosen.length ? "first " : ""}${runs.length} chosen runs, besides their names`),
  make("div", {class: "scroll"}, make("table", {}, make("thead", {}, make("tr", {}, make("th", {}, "key"), ...runs.map((name) => make("th", {}, name)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, make("td", {}, row.key), ...row.values.map((value) => make("td", {title: value ?? "not in this configuration"}, value ?? "–"))))))));

const VIEWS = {samples: drawSamples, media: drawMedia, logs: drawLogs, steps: drawSteps, report: drawReport, config: drawConfig};
const FOLLOWED = ["curves", "logs"];

// ---- keys ----
const move = (offset) => {
  const names = listed().map((row) => row.name), index = names.indexOf(state.current);
  state.current = names[Math.min(Math.max(index + offset, 0), names.length - 1)] ?? "";
  changed({view: false});
  byId("table").querySelector("tr.current")?.scrollIntoView({block: "nearest"});
};

const setTheme = () => {
  const root = document.documentElement, isDark = root.classList.contains("dark") || (!root.classList.contains("light") && matchMedia("(prefers-color-scheme: dark)").matches);
  root.classList.toggle("dark", !isDark);
  root.classList.toggle("light", isDark);
  for (const {chart} of charts.values()) chart.draw();
};

const KEYS = {
  "/": ["find runs", () => byId("filter").focus()],
  j: ["next run", () => move(1)],
  k: ["previous run", () => move(-1)],
  " ": ["choose this run, or not", () => { if (state.current) choose(state.current); }],
  a: ["choose all that are listed", () => { state.chosen = listed().slice(0, 64).map((row) => row.name); changed(); }],
  x: ["choose none", () => { state.chosen = []; changed(); }],
  l: ["logarithmic y axes", () => byId("log-axis")?.click()],
  m: ["mean of seeds", () => byId("grouped")?.click()],
  "← →": ["values of a chart that has the focus", () => {}],
  "+ −": ["zoom a chart that has the focus", () => {}],
  0: ["the whole range", () => { state.range = [null, null]; changed(); }],
  t: ["light or dark", setTheme],
  "?": ["these keys", () => byId("help").showModal()],
};
TABS.forEach(([name, title], index) => { KEYS[String(index + 1)] = [title, () => { state.tab = name; changed(); }]; });

document.addEventListener("keydown", (event) => {
  const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "range" && event.target.type !== "checkbox";
  if (event.key === "Escape" && isTyping) event.target.blur();
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  if (event.key === " " && event.target.closest?.("button, summary, input, video")) return; // which a space operates
  const action = KEYS[event.key];
  if (!action) return;
  event.preventDefault();
  action[1]();
});

// ---- start ----
let timer = 0;
const schedule = () => {
  clearTimeout(timer);
  timer = setTimeout(poll, isSampled || state.runs.some((row) => row.is_live) ? LIVE_MS : IDLE_MS);
};
const poll = async () => {
  clearTimeout(timer);
  if (!document.hidden) {
    try {
      const {runs, folder} = await ask("/api/runs");
      const isFirst = !state.runs.length && runs.length > 0;
      state.runs = runs;
      byId("folder").textContent = folder;
      byId("connection").textContent = "";
      if (isFirst && !state.chosen.length) state.chosen = [...runs].sort((a, b) => (b.updated ?? 0) - (a.updated ?? 0)).slice(0, 4).map((row) => row.name);
      drawTable();
      const isLive = isSampled || runs.some((row) => row.is_live && state.chosen.includes(row.name));
      if (isFirst || (isLive && FOLLOWED.includes(state.tab))) await showView();
      else if (!runs.length) await showView();
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      byId("connection").textContent = error.message;
    }
  }
  schedule();
};

byId("filter").addEventListener("input", (event) => { state.filter = event.target.value; changed({view: false}); });
byId("choose").addEventListener("click", () => KEYS.a[1]());
byId("clear").addEventListener("click", () => KEYS.x[1]());
byId("theme").addEventListener("click", setTheme);
byId("help-button").addEventListener("click", () => byId("help").showModal());
byId("help-close").addEventListener("click", () => byId("help").close());
byId("keys").append(...Object.entries(KEYS).flatMap(([key, [text]]) => [make("dt", {}, key === " " ? "space" : key), make("dd", {}, text)]));
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const {chart} of charts.values()) chart.draw(); });
restore();
drawTabs();
poll();
