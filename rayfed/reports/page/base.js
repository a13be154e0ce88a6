"use strict";
// Builds the page from the data in it. Data are only ever set as text, never as markup. The files of the script are one
// after the other in the page: base.js, tables.js, charts.js, page.js.

const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#8B5CF6"];
const SPLITS = ["test", "ood", "val", "train"];
const RULES = ["selected", "final", "oracle", "best5"];
const QUANTITIES = { mean: "AVG", best10: "best 10 %", worst10: "worst 10 %", worst: "worst" };
const FEW_CLIENTS = 20; // as in rayfed.results.selection
const state = { experiment: null, metric: null, split: null, point: "", rule: null, x: "round", find: "",
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
    ({ order, unseen, point, split, metric, rule, quantity, mean: mean === null ? NaN : Number(mean), sd, seeds }));
}

function pointOf(method, split) {
  return state.point || (split === "ood" ? method.point_ood : method.point);
}

// Whether validation chose the hyperparameters, at the selected point or at each method's own.
function isChosen(method) {
  return state.point ? method.chosen.includes(state.point) : method.chosen_by_default;
}

function shownMethods(experiment) {
  const words = state.find.toLowerCase().split(/\s+/).filter(Boolean);
  const several = new Map();
  for (const method of experiment.methods) several.set(method.algorithm, (several.get(method.algorithm) || 0) + 1);
  return experiment.methods.filter((method) =>
    words.every((word) => label(method).toLowerCase().includes(word)) &&
    (!state.chosen || several.get(method.algorithm) === 1 || isChosen(method)));
}
