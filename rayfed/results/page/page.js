"use strict";
// Builds the page from the data in it. Data are only ever set as text, never as markup.

const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#8B5CF6"];
const SPLITS = ["test", "ood", "val", "train"];
const RULES = ["selected", "final", "oracle", "best5"];
const QUANTITIES = { mean: "AVG", worst: "worst" };
const state = { experiment: null, metric: "accuracy", split: null, point: "", rule: null, x: "round", find: "",
  chosen: false, sort: null };
let data = JSON.parse(document.getElementById("data").textContent);
let version = null;

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function drawn(name, attributes = {}, text = null) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

const unique = (values) => [...new Set(values)];
const ordered = (values, order) => unique(values).sort((a, b) => order.indexOf(a) - order.indexOf(b));
const label = (method) => [method.algorithm, method.hyperparameters].filter(Boolean).join(" ");

// The rows of the tables, as in rayfed.results.page.content
function rowsOf(experiment) {
  return experiment.rows.map(([order, unseen, point, split, metric, rule, quantity, mean, sd, seeds]) =>
    ({ order, unseen, point, split, metric, rule, quantity, mean, sd, seeds }));
}

function pointOf(method, split) {
  return state.point || (split === "ood" ? "global" : method.point);
}

function shownMethods(experiment) {
  const words = state.find.toLowerCase().split(/\s+/).filter(Boolean);
  const several = new Map();
  for (const method of experiment.methods) several.set(method.algorithm, (several.get(method.algorithm) || 0) + 1);
  return experiment.methods.filter((method) =>
    words.every((word) => label(method).toLowerCase().includes(word)) &&
    (!state.chosen || several.get(method.algorithm) === 1 || method.chosen.includes(pointOf(method, state.split))));
}

// Keeps the choices possible: what the data do not have is replaced by the first that they have.
function settle(experiment) {
  const rows = rowsOf(experiment);
  const fit = (key, values) => { if (!values.includes(state[key])) state[key] = values[0] ?? null; };
  fit("metric", ["accuracy", ...Object.keys(experiment.metrics)].filter((name) => name in experiment.metrics));
  const ofMetric = rows.filter((row) => row.metric === state.metric && !row.unseen);
  const splits = ordered(ofMetric.map((row) => row.split), SPLITS);
  fit("split", splits);
  const points = unique(ofMetric.map((row) => row.point));
  if (state.point && !points.includes(state.point)) state.point = "";
  const rules = ordered(ofMetric.filter((row) => row.split === state.split).map((row) => row.rule), RULES);
  fit("rule", rules);
  return { metrics: Object.keys(experiment.metrics), splits, points, rules };
}

function numberText(value, percent) {
  if (percent) return (100 * value).toFixed(2);
  const digits = value === 0 ? 4 : Math.min(6, Math.max(0, 3 - Math.floor(Math.log10(Math.abs(value)))));
  return value.toFixed(digits);
}

// A table of methods and domains. Columns that repeat another are left out, as in rayfed.results.result_table.
function resultTable(experiment, methods, rows, metric) {
  const { percent, higher } = experiment.metrics[metric];
  const byMethod = new Map(methods.map((method) => [method.order, new Map()]));
  for (const row of rows) byMethod.get(row.order)?.set(row.quantity, row);
  const shown = methods.filter((method) => byMethod.get(method.order).has("mean"));
  if (!shown.length) return element("p", { class: "note" }, "No method has such values.");
  const domains = unique(rows.map((row) => row.quantity).filter((name) => name.startsWith("domain:")))
    .sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
  const text = (method, quantity) => {
    const cell = byMethod.get(method.order).get(quantity);
    return cell ? numberText(cell.mean, percent) + (cell.sd === null ? "" : ` ± ${numberText2(cell, percent)}`) : "-";
  };
  let columns = [...domains, "mean", "worst"];
  const same = (one, other) => shown.every((method) => text(method, one) === text(method, other));
  if (domains.some((name) => same("worst", name)) || same("worst", "mean")) columns = columns.filter((c) => c !== "worst");
  if (domains.some((name) => same("mean", name))) columns = columns.filter((c) => c !== "mean");
  const seeds = unique(shown.map((method) => byMethod.get(method.order).get("mean").seeds));
  const several = new Map();
  for (const method of experiment.methods) several.set(method.algorithm, (several.get(method.algorithm) || 0) + 1);
  const hasHyperparameters = shown.some((method) => method.hyperparameters);

  const value = (method, column) => byMethod.get(method.order).get(column)?.mean;
  const lines = [...shown];
  if (state.sort) {
    const [column, sign] = state.sort;
    const worst = higher ? -Infinity : Infinity;
    lines.sort((a, b) => column === "algorithm" ? sign * label(a).localeCompare(label(b))
      : sign * ((value(b, column) ?? worst) - (value(a, column) ?? worst)) * (higher ? 1 : -1));
  }
  const ranks = new Map(columns.map((column) => [column, unique(shown.map((method) => value(method, column))
    .filter((number) => number !== undefined).map((number) => numberText(number, percent)))
    .sort((a, b) => higher ? b - a : a - b)]));
  const sorter = (column) => () => {
    state.sort = state.sort && state.sort[0] === column ? [column, -state.sort[1]] : [column, 1];
    render();
  };
  const head = (name, column, kind = "") =>
    element("th", { class: `sortable ${kind}`, scope: "col", title: "sort", onclick: sorter(column) }, name);
  const header = element("tr", {}, head("algorithm", "algorithm", "text"),
    hasHyperparameters ? element("th", { class: "text", scope: "col" }, "hyperparameters") : null,
    ...columns.map((column) => head(QUANTITIES[column] ?? column.slice("domain:".length), column)),
    seeds.length > 1 ? element("th", { scope: "col" }, "seeds") : null);
  const body = lines.map((method) => {
    const mark = method.chosen.includes(pointOf(method, rows[0].split)) && several.get(method.algorithm) > 1 ? " †" : "";
    return element("tr", {}, element("td", { class: "text" }, method.algorithm),
      hasHyperparameters ? element("td", { class: "text" }, method.hyperparameters + mark) : null,
      ...columns.map((column) => {
        const cell = byMethod.get(method.order).get(column);
        if (!cell) return element("td", {}, "-");
        const number = numberText(cell.mean, percent);
        const order = ranks.get(column);
        const rank = order.length < 2 ? "" : number === order[0] ? "best" : number === order[1] ? "second" : "";
        const spread = cell.sd === null ? null : element("span", { class: "sd" }, ` ± ${numberText2(cell, percent)}`);
        return element("td", { class: rank }, number, spread);
      }),
      seeds.length > 1 ? element("td", {}, String(byMethod.get(method.order).get("mean").seeds)) : null);
  });
  return element("div", { class: "scroll" },
    element("table", { class: "results" }, element("thead", {}, header), element("tbody", {}, ...body)));
}

// The standard deviation with the decimals of the mean
function numberText2(cell, percent) {
  const decimals = (numberText(cell.mean, percent).split(".")[1] ?? "").length;
  return ((percent ? 100 : 1) * cell.sd).toFixed(decimals);
}

function ticks(low, high) {
  const raw = (high - low || Math.abs(high) || 1) / 6;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const list = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) list.push(+tick.toPrecision(10));
  return list;
}

function chart(experiment, methods) {
  const { percent } = experiment.metrics[state.metric];
  const scale = percent ? 100 : 1;
  const place = { round: null, gigabytes: 2, epsilon: 3 }[state.x];
  const axis = new Map(experiment.axes.map((line) => [`${line[0]} ${line[1]}`, line]));
  const lines = methods.map((method) => ({
    method,
    points: experiment.curves
      .filter(([order, point, split, metric]) =>
        order === method.order && point === pointOf(method, state.split) && split === state.split && metric === state.metric)
      .map(([order, , , , round, mean, sd, seeds]) => ({
        round, x: place === null ? round : axis.get(`${order} ${round}`)?.[place], seeds,
        y: scale * mean, low: scale * (mean - (sd ?? 0)), high: scale * (mean + (sd ?? 0)),
      }))
      .filter((point) => point.x !== null && point.x !== undefined)
      .sort((a, b) => a.round - b.round),
  })).filter((line) => line.points.length);
  if (!lines.length) return element("p", { class: "note" }, "No method has such a curve.");
  const all = lines.flatMap((line) => line.points);
  const [width, height, left, bottom, top] = [860, 400, 56, 44, 10];
  const bounds = (values) => { const low = Math.min(...values), high = Math.max(...values);
    const pad = (high - low || Math.abs(high) || 1) * 0.04; return [low - pad, high + pad]; };
  const [x0, x1] = bounds(all.map((point) => point.x));
  const [y0, y1] = bounds(all.flatMap((point) => [point.low, point.high]));
  const px = (x) => left + (x - x0) / (x1 - x0) * (width - left - 10);
  const py = (y) => height - bottom - (y - y0) / (y1 - y0) * (height - bottom - top);
  const svg = drawn("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `${state.split} ${state.metric} of ${lines.length} methods` });
  for (const tick of ticks(y0, y1)) {
    svg.append(drawn("line", { class: "grid", x1: left, x2: width - 10, y1: py(tick), y2: py(tick) }),
      drawn("text", { x: left - 6, y: py(tick) + 4, "text-anchor": "end" }, String(tick)));
  }
  for (const tick of ticks(x0, x1)) {
    if (state.x === "round" && !Number.isInteger(tick)) continue;
    svg.append(drawn("text", { x: px(tick), y: height - bottom + 18, "text-anchor": "middle" }, String(tick)));
  }
  const names = { round: "round", gigabytes: "GB sent so far, by and to all clients", epsilon: "ε spent so far" };
  svg.append(drawn("text", { x: (left + width) / 2, y: height - 6, "text-anchor": "middle" }, names[state.x]));
  svg.append(drawn("text", { x: 14, y: height / 2, "text-anchor": "middle", transform: `rotate(-90 14 ${height / 2})` },
    `${state.split} ${state.metric}${percent ? " (%)" : ""}`));
  const legend = element("div", { class: "legend" });
  const bands = svg.appendChild(drawn("g")); // below all lines
  for (const { method, points } of lines) {
    const colour = COLOURS[experiment.methods.indexOf(method) % COLOURS.length];
    const path = (get) => points.map((point) => `${px(point.x).toFixed(1)},${py(get(point)).toFixed(1)}`);
    if (points.some((point) => point.high > point.low)) {
      const band = [...path((p) => p.high), ...path((p) => p.low).reverse()].join(" ");
      bands.append(drawn("polygon", { points: band, fill: colour, opacity: 0.14 }));
    }
    svg.append(drawn("polyline", { points: path((p) => p.y).join(" "), fill: "none", stroke: colour, "stroke-width": 2 }));
    for (const point of points) {
      const dot = drawn("circle", { cx: px(point.x), cy: py(point.y), r: points.length > 40 ? 2 : 3.5, fill: colour });
      dot.append(drawn("title", {}, `${label(method)}, round ${point.round}: ${point.y.toPrecision(4)}` +
        (point.seeds > 1 ? ` ± ${(point.high - point.y).toPrecision(3)}` : "")));
      svg.append(dot);
    }
    const entry = element("span", {}, label(method) + (points[0].seeds === 1 ? " (single seed)" : ""));
    entry.style.setProperty("--colour", colour);
    legend.append(entry);
  }
  return element("figure", { id: "chart" }, svg, legend);
}

function plainTable(columns, textColumns, rows) {
  const kind = (index) => textColumns.includes(index) ? "text" : "";
  return element("div", { class: "scroll" }, element("table", {},
    element("thead", {}, element("tr", {}, ...columns.map((name, i) => element("th", { class: kind(i), scope: "col" }, name)))),
    element("tbody", {}, ...rows.map((row) =>
      element("tr", {}, ...row.map((cell, i) => element("td", { class: kind(i) }, cell)))))));
}

function pairsSection(experiment, methods) {
  const pairs = experiment.pairs.find((one) => one.metric === state.metric && one.split === state.split);
  if (!pairs) return null;
  const shown = new Set(methods.map((method) => method.order));
  const keep = pairs.orders.map(([a, b]) => shown.has(a) && shown.has(b));
  const rows = pairs.columns[0][1].map((_, i) => pairs.columns.map(([, cells]) => cells[i])).filter((_, i) => keep[i]);
  if (!rows.length) return null;
  return element("section", { id: "pairs" }, element("h2", {}, "All pairs"),
    element("p", { class: "note" }, `${pairs.split} ${pairs.metric}, mean over clients, ${pairs.caption}, ` +
      "at the model that each method's paper scores"),
    plainTable(pairs.columns.map(([name]) => name), [0], rows),
    ...pairs.notes.map((note) => element("p", { class: "note" }, note)));
}

function trialsSection(experiment) {
  const counts = new Map();
  for (const trial of experiment.trials) counts.set(trial.status, (counts.get(trial.status) || 0) + 1);
  const words = [...counts].map(([status, count]) => `${count} ${status}`).join(", ");
  const failed = experiment.trials.filter((trial) => ["failed", "diverged", "lost"].includes(trial.status));
  const rows = experiment.trials.map((trial) => [trial.trial, trial.algorithm, String(trial.seed),
    element("span", { class: trial.status }, trial.status), `${trial.round} of ${trial.rounds ?? "?"}`,
    trial.seconds === null ? "-" : trial.seconds.toFixed(1), trial.partition_hash ?? "-", trial.weights_hash ?? "-"]);
  return element("section", { id: "trials" }, element("h2", {}, `Trials: ${words}`),
    ...failed.map((trial) => element("details", { class: "failure" },
      element("summary", {}, element("span", { class: trial.status }, `${trial.trial} ${trial.status}`),
        `: ${trial.error ?? "no error recorded"}`),
      trial.traceback ? element("pre", {}, trial.traceback) : null)),
    element("details", {}, element("summary", {}, "All trials"), plainTable(
      ["trial", "algorithm", "seed", "status", "rounds", "seconds", "partition", "weights"], [0, 1, 3, 6, 7], rows)));
}

function repeatSection(experiment, methods) {
  const byOrder = new Map(experiment.methods.map((method) => [method.order, method]));
  const shown = new Set(methods.map((method) => method.order));
  const versions = experiment.versions.map((one) =>
    Object.entries(one).map(([name, value]) => `${name} ${value ?? "-"}`).join(", "));
  return element("section", { id: "repeat" }, element("h2", {}, "To repeat it"),
    ...versions.map((line) => element("p", {}, `Versions: ${line}`)),
    element("p", { class: "note" }, "The same versions on the same type of machine give the same bits; another type of " +
      "CPU changes last bits, and so decimals."),
    ...experiment.configurations.filter((one) => shown.has(one.order)).map((one) => element("details", {},
      element("summary", {}, `Configuration of ${label(byOrder.get(one.order))}`), element("pre", {}, one.yaml))));
}

function tableSections(experiment, methods) {
  const rows = rowsOf(experiment).filter((row) => row.metric === state.metric);
  const byOrder = new Map(experiment.methods.map((method) => [method.order, method]));
  const percent = experiment.metrics[state.metric].percent ? ", %" : "";
  const part = (split, rule) => rows.filter((row) => !row.unseen && row.split === split && row.rule === rule &&
    row.point === pointOf(byOrder.get(row.order), split));
  const caption = (rule) => data.rules[rule].replace("{criterion}", experiment.criterion);
  const parts = [element("h2", {}, `${state.split} ${state.metric}${percent}`),
    element("p", { class: "note" }, `${caption(state.rule)}; ${experiment.repetitions}. AVG: mean over clients. ` +
      "worst: the worst client. Bold: best; underlined: second. †: chosen by validation."),
    resultTable(experiment, methods, part(state.split, state.rule), state.metric)];
  if (state.split !== "ood" && rows.some((row) => row.split === "ood" && !row.unseen)) {
    const rule = rows.some((row) => row.split === "ood" && row.rule === state.rule) ? state.rule : "final";
    parts.push(element("h2", {}, `Out of domain: ${state.metric}${percent} on domains that no client holds`),
      element("p", { class: "note" }, `${caption(rule)}; the global model.`),
      resultTable(experiment, methods, part("ood", rule), state.metric));
  }
  for (const point of ["downloaded", "adapted"]) {
    const unseen = rows.filter((row) => row.unseen && row.split === state.split && row.rule === "final" && row.point === point);
    if (unseen.length) {
      parts.push(element("h2", {}, `Unseen clients, ${point} model: ${state.split} ${state.metric}${percent}`),
        resultTable(experiment, methods, unseen, state.metric));
    }
  }
  return parts;
}

function filters(experiment, choices) {
  const form = document.getElementById("filters");
  const focused = document.activeElement?.id;
  const select = (key, name, values, texts = values) => element("label", {}, name,
    element("select", { id: key, onchange: (event) => { state[key] = event.target.value; render(); } },
      ...values.map((value, i) => element("option", { value, selected: value === state[key] }, texts[i]))));
  const names = data.experiments.map((one) => one.name);
  const hasEpsilon = experiment.axes.some((line) => line[3] !== null);
  const axes = ["round", "gigabytes", ...(hasEpsilon ? ["epsilon"] : [])];
  const find = document.getElementById("find") ?? element("input", { id: "find", type: "search",
    placeholder: "fedavg mu=0.1", oninput: (event) => { state.find = event.target.value; render(); } });
  form.replaceChildren(
    names.length > 1 ? select("experiment", "experiment", names) : "",
    select("metric", "metric", choices.metrics), select("split", "split", choices.splits),
    select("point", "model scored", ["", ...choices.points], ["as in each paper", ...choices.points]),
    select("rule", "round", choices.rules), select("x", "curves over", axes, axes.map((name) => ({ round: "rounds",
      gigabytes: "bytes", epsilon: "ε" })[name])),
    element("label", {}, "methods with", find),
    element("label", { class: "check" }, element("input", { id: "chosen", type: "checkbox", checked: state.chosen,
      onchange: (event) => { state.chosen = event.target.checked; render(); } }), "chosen hyperparameters only"));
  if (focused) document.getElementById(focused)?.focus();
}

function render() {
  const main = document.getElementById("main");
  document.getElementById("source").textContent = `${data.folder}${data.version ? `, read by rayfed ${data.version}` : ""}`;
  const experiment = data.experiments.find((one) => one.name === state.experiment) ?? data.experiments[0];
  if (!experiment) {
    document.getElementById("filters").replaceChildren();
    main.replaceChildren(element("p", {}, `Nothing to show yet: ${data.waiting}`));
    return;
  }
  state.experiment = experiment.name;
  if (!experiment.methods.length) {
    document.getElementById("filters").replaceChildren();
    main.replaceChildren(element("p", {}, "No trial is done yet."), trialsSection(experiment));
    return;
  }
  filters(experiment, settle(experiment));
  const methods = shownMethods(experiment);
  const open = [...main.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent);
  main.replaceChildren(
    ...tableSections(experiment, methods),
    ...experiment.notes.map((note) => element("p", { class: "note" }, note)),
    element("h2", {}, "Curves"), chart(experiment, methods),
    ...[pairsSection(experiment, methods)].filter(Boolean),
    element("h2", {}, "Pictures"),
    ...experiment.pictures.map((one) => element("figure", {},
      element("img", { class: "picture", src: one.source, alt: one.shows }),
      element("figcaption", {}, `${one.shows} (the filters do not apply)`))),
    trialsSection(experiment), repeatSection(experiment, methods));
  for (const summary of main.querySelectorAll("details > summary")) {
    if (open.includes(summary.textContent)) summary.parentElement.open = true;
  }
}

async function refresh() {
  const line = document.getElementById("live");
  try {
    const answer = await fetch(`/data.json?have=${version ?? ""}`, { cache: "no-store" });
    if (answer.status === 200) {
      version = answer.headers.get("X-Version");
      data = await answer.json();
      render();
    }
    line.textContent = `live, last asked ${new Date().toLocaleTimeString()}`;
  } catch {
    line.textContent = "the server has gone; this is what it last said";
  }
  setTimeout(refresh, 3000);
}

render();
if (LIVE) {
  document.getElementById("live").hidden = false;
  refresh();
}
