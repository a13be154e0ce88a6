// The sections of the page beside tables and charts, the filters, and what redraws everything when one is changed.

// Keeps the choices possible: what the data do not have is replaced by the first that they have.
function settle(experiment) {
  const rows = rowsOf(experiment);
  const fit = (key, values) => { if (!values.includes(state[key])) state[key] = values[0] ?? null; };
  fit("metric", [experiment.criterion, ...Object.keys(experiment.metrics)].filter((name) => name in experiment.metrics));
  const ofMetric = rows.filter((row) => row.metric === state.metric && !row.unseen);
  const splits = ordered(ofMetric.map((row) => row.split), SPLITS);
  fit("split", splits);
  const points = unique(ofMetric.map((row) => row.point));
  if (state.point && !points.includes(state.point)) state.point = "";
  const rules = ordered(ofMetric.filter((row) => row.split === state.split).map((row) => row.rule), RULES);
  fit("rule", rules);
  return { metrics: Object.keys(experiment.metrics), splits, points, rules };
}

function pairsSection(experiment, methods) {
  const pairs = experiment.pairs.find((one) => one.metric === state.metric && one.split === state.split);
  if (!pairs) return null;
  const shown = new Set(methods.map((method) => method.order));
  const keep = pairs.orders.map(([a, b]) => shown.has(a) && shown.has(b));
  const rows = pairs.columns[0][1].map((_, i) => pairs.columns.map(([, cells]) => cells[i])).filter((_, i) => keep[i]);
  if (!rows.length) return null;
  return element("section", { id: "pairs" }, element("h2", {}, "All pairs"),
    element("p", { class: "note" }, `${pairs.split} ${pairs.metric}, ${pairs.caption}, ` +
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
    ...[...differentClients(experiment, methods), ...experiment.notes].map((note) => element("p", { class: "note" }, note)),
    ...chartSections(experiment, methods),
    ...[pairsSection(experiment, methods)].filter(Boolean),
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
