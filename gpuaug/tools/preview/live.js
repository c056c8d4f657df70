// The page of `gpuaug preview serve=true`. It sends requests only to its own server. The pictures are a page of their
// own, in a frame without scripts. Every other text is inserted as text, never as HTML.
"use strict";

const at = (id) => document.getElementById(id);
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
const drawn = new Map(); // the latest pages, by what was asked for
const folded = new Map(); // whether the user opened an operation
let state; // the server's latest answer
let view; // what the user changed: recipe, seed, samples, epoch, changes, and ops: [name, example or null, is on]
let busy = false, again = false;

function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

// What the server should draw. Parameters of operations that are switched off are left out.
function asked(before = false) {
  const { recipe, seed, samples, epoch } = view;
  if (before) return { recipe, seed, samples, epoch };
  const off = Object.entries(view.ops).flatMap(([key, list]) => list.filter((x) => !x[2]).map((x) => `${key}.${x[0]}.`));
  const ops = Object.entries(view.ops).map(([key, list]) => [key, list.filter((x) => x[2]).map((x) => x.slice(0, 2))]);
  const changes = Object.entries(view.changes).filter(([key]) => !off.some((prefix) => key.startsWith(prefix)));
  return { recipe, seed, samples, epoch, ops: Object.fromEntries(ops), changes: Object.fromEntries(changes) };
}

async function call(name, body) {
  const answer = await fetch(name, { method: "POST", body: JSON.stringify(body) }).catch(() => {
    throw new Error("gpuaug does not answer. If it has ended, start it again and open the new address.");
  });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.text();
}

function fail(error) {
  at("error").textContent = error.message;
  at("error").hidden = false;
}

// Show a page of pictures. The scroll position and the enlarged picture stay.
async function put(text) {
  const old = document.querySelector("iframe");
  const frame = make("iframe", { title: "Samples, augmented with this recipe", sandbox: "allow-same-origin", srcdoc: text });
  at("overrides").parentNode.append(frame);
  await new Promise((loaded) => { frame.onload = loaded; });
  if (!old) return;
  const boxes = (of) => [...of.contentDocument.querySelectorAll("input")];
  const open = boxes(frame)[boxes(old).findIndex((box) => box.checked)];
  if (open) open.checked = true;
  frame.contentWindow.scrollTo(old.contentWindow.scrollX, old.contentWindow.scrollY);
  old.remove();
}

// Requests run one at a time. A change during a request is drawn after the answer.
async function draw() {
  again = true;
  if (busy) return;
  busy = true;
  document.body.classList.add("working");
  while (again) {
    again = false;
    at("status").textContent = "drawing …";
    const begin = performance.now();
    try {
      history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify(view))}`);
      const body = asked(view.before), key = JSON.stringify(body);
      const found = JSON.parse(await call("state", asked()));
      if (again) continue; // what was asked for has changed
      const changed = !state || !same(list(found), list(state));
      state = found;
      if (view.before) state.overrides = JSON.parse(await call("state", body)).overrides; // those of the pictures
      show(changed);
      if (!drawn.has(key)) drawn.set(key, await call("render", body));
      if (drawn.size > 12) drawn.delete(drawn.keys().next().value);
      await put(drawn.get(key));
      at("error").hidden = true;
      at("status").textContent = `drawn in ${((performance.now() - begin) / 1000).toFixed(1)} s`;
    } catch (error) {
      fail(error);
      at("status").textContent = state ? "not drawn" : "not drawn; Reset begins again";
      at("controls").inert = !state;
    }
  }
  busy = false;
  document.body.classList.remove("working");
}

// What decides which controls there are.
const list = (of) => [of.recipe, of.ops, of.controls];

function set(control, value, row) {
  view.changes[control.key] = value;
  if (same(value, control.value)) delete view.changes[control.key];
  row.classList.toggle("changed", control.key in view.changes);
  draw();
}

// A slider and a field that show the same number. The field also takes numbers beyond the slider's ends.
function number(control, first, label, change) {
  const limits = { min: control.low, max: control.high, step: control.step };
  const slider = make("input", { type: "range", ...limits, value: first, ariaLabel: label });
  const field = make("input", { type: "number", step: control.step, value: Number(first.toPrecision(5)), ariaLabel: label });
  slider.addEventListener("input", () => { field.value = slider.value; change(Number(slider.value)); });
  field.addEventListener("input", () => {
    if (field.value === "") return;
    slider.value = field.value;
    change(Number(field.value));
  });
  field.addEventListener("change", () => { if (field.value === "") field.value = slider.value; });
  return [slider, field];
}

function row(control) {
  const { key } = control, line = make("div", { className: "row" }, make("label", { textContent: control.name }));
  const value = key in view.changes ? view.changes[key] : control.value;
  line.dataset.key = line.title = key;
  line.classList.toggle("changed", key in view.changes);
  if (typeof value === "boolean") {
    const box = make("input", { type: "checkbox", checked: value, className: "wide", ariaLabel: key });
    box.addEventListener("change", () => set(control, box.checked, line));
    line.append(box);
  } else if (typeof value === "string") {
    const words = make("select", { className: "wide", ariaLabel: key });
    words.append(...control.choices.map((word) => make("option", { textContent: word, selected: word === value })));
    words.addEventListener("change", () => set(control, words.value, line));
    line.append(words);
  } else if (Array.isArray(value)) {
    const now = [...value];
    value.forEach((first, n) => line.append(...number(control, first, `${key} ${n + 1}`, (changed) => {
      now[n] = changed;
      set(control, [...now], line);
    })));
  } else {
    line.append(...number(control, value, key, (now) => set(control, now, line)));
  }
  return line;
}

// A block that can be folded. It stays as the user left it.
function block(id, isOpen, title, rows) {
  const made = make("details", { open: folded.get(id) ?? isOpen }, title, ...rows);
  made.dataset.id = id;
  made.addEventListener("toggle", () => folded.set(id, made.open));
  return made;
}

// The operations of one mapping `ops`: switch, name, class, arrows, and the parameters.
function operations(key, rowsOf) {
  const items = view.ops[key] ?? state.ops[key].map(([name]) => [name, null, true]);
  const kinds = Object.fromEntries(state.ops[key]);
  const edit = (change) => {
    const now = structuredClone(items);
    change(now);
    view.ops[key] = now;
    draw();
    show(true);
  };
  const blocks = items.map(([name, example, isOn], n) => {
    const box = make("input", { type: "checkbox", checked: isOn, ariaLabel: `${key}.${name} on or off` });
    box.addEventListener("change", () => edit((now) => { now[n][2] = box.checked; }));
    const move = (label, text, to) => {
      const button = make("button", { type: "button", textContent: text, ariaLabel: `${key}.${name} ${label}`, disabled: !items[to] });
      button.addEventListener("click", () => edit((now) => now.splice(to, 0, ...now.splice(n, 1))));
      return button;
    };
    const kind = make("span", { textContent: kinds[name] ?? example });
    const title = make("summary", {}, name, kind);
    const made = block(`${key}.${name}`, items.length < 7, title, isOn ? rowsOf(`${key}.${name}`) : []);
    const moves = make("span", {}, move("earlier", "↑", n - 1), move("later", "↓", n + 1));
    return make("div", { className: isOn ? "op" : "op off" }, box, made, moves);
  });
  const menu = make("select", { ariaLabel: `add to ${key}` }, make("option", { textContent: "add an operation …", value: "" }));
  menu.append(...state.examples.map((name) => make("option", { textContent: name })));
  const add = make("button", { type: "button", textContent: "Add", ariaLabel: `add the operation to ${key}` });
  add.addEventListener("click", () => menu.value && edit((now) => {
    let name = menu.value;
    const taken = [...now.map((x) => x[0]), ...state.nulls[key]]; // Hydra keeps the place of a name that is null
    for (let n = 2; taken.includes(name); n += 1) name = `${menu.value}${n}`;
    now.push([name, menu.value, true]);
  }));
  return [make("h2", { textContent: key.replace(/^.*?augment\./, "") }), ...blocks, make("div", { className: "add" }, menu, add)];
}

function show(withControls) {
  const focused = document.activeElement?.ariaLabel;
  if (!same([...at("recipe").options].map((x) => x.value), state.recipes)) {
    at("recipe").replaceChildren(...state.recipes.map((name) => make("option", { textContent: name })));
  }
  at("recipe").value = state.recipe;
  at("before").checked = view.before;
  for (const id of ["samples", "seed", "epoch"]) {
    if (document.activeElement !== at(id)) at(id).value = id === "samples" ? state[id].join(", ") : state[id];
  }
  at("size").textContent = `of ${state.size}`;
  at("overrides").textContent = state.overrides;
  if (!withControls) return;
  const places = Object.entries(state.ops).flatMap(([key]) =>
    (view.ops[key] ?? state.ops[key]).map(([name]) => `${key}.${name}`)).sort((a, b) => b.length - a.length);
  const rows = new Map();
  for (const control of state.controls) {
    const place = places.find((path) => control.key.startsWith(`${path}.`)) ?? control.group;
    if (!rows.has(place)) rows.set(place, []);
    rows.get(place).push(row(control));
  }
  const others = [...rows].filter(([place]) => !places.includes(place)).map(([place, lines]) =>
    block(place, true, make("summary", { textContent: place.replace(/(^|\.)(views|schedule)\./g, "$1") || "recipe" }), lines));
  const lists = Object.keys(state.ops).flatMap((key) => operations(key, (place) => rows.get(place) ?? []));
  at("controls").replaceChildren(...others, ...lists);
  at("controls").inert = false;
  if (focused) [...document.querySelectorAll("nav [aria-label]")].find((x) => x.ariaLabel === focused)?.focus();
}

async function copy() {
  if (!state) return fail(new Error("Nothing is drawn yet, so there is nothing to copy."));
  try {
    await navigator.clipboard.writeText(state.overrides);
    at("status").textContent = "copied";
  } catch (error) {
    fail(error);
  }
}

// Begin with what an address says. The controls wait for the server's answer.
function reset(first = {}) {
  const none = { recipe: null, seed: null, samples: null, epoch: null, before: false, changes: {}, ops: {} };
  const good = first && same(Object.keys({ ...none, ...first }), Object.keys(none)) && [first.changes, first.ops].every(
    (x) => x === undefined || (x && typeof x === "object" && !Array.isArray(x)),
  ) && Object.values(first.ops ?? {}).every((x) => Array.isArray(x) && x.every((y) => Array.isArray(y) && y.length === 3));
  view = { ...none, ...(good ? first : {}) };
  state = undefined;
  at("controls").inert = true;
  draw();
}

function fromAddress() {
  try {
    reset(JSON.parse(decodeURIComponent(location.hash.slice(1)) || "{}"));
  } catch {
    reset();
  }
}

const kept = new Map(); // the changes of each recipe that was left
const whole = (text) => (text === "" ? null : Number.isSafeInteger(Number(text)) ? Number(text) : text);
at("recipe").addEventListener("change", () => {
  kept.set(state.recipe, { changes: view.changes, ops: view.ops });
  Object.assign(view, { recipe: at("recipe").value, changes: {}, ops: {}, ...kept.get(at("recipe").value) });
  at("controls").inert = true;
  draw();
});
at("samples").addEventListener("change", () => {
  const words = at("samples").value.split(/[\s,]+/).filter(Boolean);
  view.samples = words.length ? words.map((word) => (/^\d+$/.test(word) ? Number(word) : word)) : null;
  draw();
});
at("next").addEventListener("click", () => { if (state && !busy) { view.samples = state.next; draw(); } });
for (const id of ["seed", "epoch"]) at(id).addEventListener("change", () => { view[id] = whole(at(id).value); draw(); });
at("before").addEventListener("change", () => { view.before = at("before").checked; draw(); });
at("copy-overrides").addEventListener("click", copy);
at("reset").addEventListener("click", () => reset());
addEventListener("hashchange", fromAddress);
fromAddress();
