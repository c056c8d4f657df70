// The page of `gpuaug preview serve=true`. It sends requests only to its own server, and never inserts text as HTML.
"use strict";

const at = (id) => document.getElementById(id);
const values = new Map(); // the value that each control shows, by key
let state, shown, busy = false, again = false, address; // shown: the request of the picture on the page

function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

function asked() {
  const changed = state.controls.filter((c) => !same(values.get(c.key), c.value));
  const words = at("indices").value.split(/[\s,]+/).filter(Boolean);
  return {
    changes: Object.fromEntries(changed.map((c) => [c.key, values.get(c.key)])),
    indices: words.length ? words.map((word) => (/^\d+$/.test(word) ? Number(word) : word)) : null,
    epoch: at("epoch").value === "" ? null : Number(at("epoch").value),
  };
}

async function call(name, body) {
  const answer = await fetch(name, body && { method: "POST", body: JSON.stringify(body) }).catch(() => {
    throw new Error("gpuaug does not answer. If it has ended, start it again and open the new address.");
  });
  if (!answer.ok) throw new Error(await answer.text());
  return answer;
}

function fail(error) {
  at("error").textContent = error.message;
  at("error").hidden = false;
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
    const begin = performance.now(), body = asked();
    try {
      const words = await (await call("overrides", body)).text();
      const picture = await (await call("render", body)).blob();
      if (address) URL.revokeObjectURL(address);
      at("picture").src = address = URL.createObjectURL(picture);
      await at("picture").decode();
      at("overrides").textContent = words;
      at("error").hidden = true;
      shown = body;
      at("status").textContent = `drawn in ${((performance.now() - begin) / 1000).toFixed(1)} s`;
    } catch (error) {
      fail(error);
      at("status").textContent = "not drawn";
    }
  }
  busy = false;
  document.body.classList.remove("working");
}

function set(control, value, row) {
  values.set(control.key, value);
  row.classList.toggle("changed", !same(value, control.value));
  draw();
}

// A slider and a field that show the same number. The field also takes numbers beyond the slider's ends.
function number(control, first, label, change) {
  const limits = { min: control.low, max: control.high, step: control.step };
  const slider = make("input", { type: "range", ...limits, value: first, ariaLabel: label });
  const field = make("input", { type: "number", step: control.step, value: first, ariaLabel: label });
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
  const { key, value } = control, line = make("div", { className: "row" }, make("label", { textContent: control.name }));
  line.dataset.key = key;
  line.title = key;
  values.set(key, value);
  if (typeof value === "boolean") {
    const box = make("input", { type: "checkbox", checked: value, className: "wide", ariaLabel: key });
    box.addEventListener("change", () => set(control, box.checked, line));
    line.append(box);
  } else if (typeof value === "string") {
    const list = make("select", { className: "wide", ariaLabel: key });
    list.append(...control.choices.map((word) => make("option", { textContent: word, selected: word === value })));
    list.addEventListener("change", () => set(control, list.value, line));
    line.append(list);
  } else if (Array.isArray(value)) {
    value.forEach((first, n) => line.append(...number(control, first, `${key} ${n + 1}`, (now) =>
      set(control, values.get(key).map((old, m) => (m === n ? now : old)), line))));
  } else {
    line.append(...number(control, value, key, (now) => set(control, now, line)));
  }
  return line;
}

function show() {
  const groups = new Map();
  for (const control of state.controls) {
    if (!groups.has(control.group)) groups.set(control.group, []);
    groups.get(control.group).push(control);
  }
  at("controls").replaceChildren(...[...groups].map(([group, members], number) => {
    const title = make("summary", {}, group.replace(/(^|\.)(ops|views|stages)\./g, "$1") || "recipe",
      make("span", { textContent: members[0].title }));
    return make("details", { open: number < 6 }, title, ...members.map(row));
  }));
  if (!groups.size) at("controls").textContent = "This recipe has no parameters to change.";
  at("indices").value = state.indices.join(", ");
  at("epoch").value = state.epoch;
  at("size").textContent = `of ${state.size}`;
  draw();
}

async function copy() {
  if (!shown) return fail(new Error("Nothing is drawn yet, so there is nothing to copy."));
  try {
    await navigator.clipboard.writeText(await (await call("overrides", shown)).text());
    at("status").textContent = "copied";
  } catch (error) {
    fail(error);
  }
}

at("copy-overrides").addEventListener("click", copy);
at("reset").addEventListener("click", show);
at("indices").addEventListener("change", draw);
at("epoch").addEventListener("change", draw);
call("state").then((answer) => answer.json()).then((found) => { state = found; show(); }).catch(fail);
