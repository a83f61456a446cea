// Every control of a request, with its default, as a form; and the request they make.

import { find, make } from "./dom.js";

const number = (name, label, neutral, limits = {}) => ({ name, label, neutral, kind: "number", ...limits });

const GROUPS = [
  ["Sampling", [
    number("temperature", "Temperature", 1, { min: 0, max: 100 }),
    number("top_p", "Top-p", 1, { min: 0, max: 1 }),
    number("top_k", "Top-k", "all", { min: -1 }),
    number("min_p", "Min-p", 0, { min: 0, max: 1 }),
    number("seed", "Seed", "random"),
    number("n", "Replies", 1, { min: 1, max: 8 }),
  ]],
  ["Penalties", [
    number("repetition_penalty", "Repetition", 1, { min: 0.01, max: 100 }),
    number("presence_penalty", "Presence", 0, { min: -2, max: 2 }),
    number("frequency_penalty", "Frequency", 0, { min: -2, max: 2 }),
  ]],
  ["Length and end", [
    number("max_tokens", "At most", "as fits", { min: 1 }),
    number("min_tokens", "At least", 0, { min: 0 }),
    { name: "stop", label: "Stop at", kind: "lines", hint: "a text on each line, up to 4" },
    { name: "ignore_eos", label: "Go on after the model's own end", kind: "flag" },
  ]],
  ["Words", [
    { name: "bad_words", label: "Never say", kind: "lines", hint: "a word on each line" },
    { name: "logit_bias", label: "Bias", kind: "json", hint: '{"token id": -100 to 100}' },
    { name: "allowed_token_ids", label: "Only these tokens", kind: "json", hint: "[token ids]" },
  ]],
  ["Shape of the reply", [
    { name: "schema", label: "JSON schema", kind: "json", rows: 4, hint: '{"type": "object", …}' },
    { name: "tools", label: "Tools", kind: "json", rows: 4, chat: true, hint: '[{"type": "function", …}]' },
    { name: "tool_choice", label: "Tool choice", kind: "json", chat: true, hint: '"auto", "required", …' },
  ]],
  ["Evidence", [
    number("draft_tokens", "Longest draft", "server's", { min: 0, max: 255 }),
    { name: "evidence", label: "Ask for certificates and a receipt", kind: "flag", start: true },
    { name: "marks", label: "Show them on the text", kind: "flag", start: true, own: true },
    { name: "ghosts", label: "Show rejected guesses", kind: "flag", start: false, own: true },
  ]],
];
const ALL = GROUPS.flatMap(([, controls]) => controls);
const START = { max_tokens: "256" };

const control = (name) => find(`option-${name}`);

function field(own) {
  const id = `option-${own.name}`;
  const base = { id, name: own.name };
  if (own.kind === "flag") {
    const box = make("input", { ...base, type: "checkbox", checked: own.start ?? false });
    return make("label", { className: "flag" }, box, own.label);
  }
  const label = make("label", { htmlFor: id }, own.label);
  if (own.kind === "number") {
    const { min = "", max = "" } = own;
    const input = make("input", { ...base, type: "number", placeholder: String(own.neutral), min, max, step: "any" });
    return make("div", { className: "field" }, label, input);
  }
  const area = make("textarea", { ...base, rows: own.rows ?? 1, placeholder: own.hint, spellcheck: false });
  return make("div", { className: own.chat ? "field tall chat-only" : "field tall" }, label, area);
}

export function buildOptions() {
  const system = make("textarea", { id: "option-system", rows: 3, placeholder: "none" });
  const first = make("div", { className: "field tall chat-only" },
    make("label", { htmlFor: "option-system" }, "System prompt"), system);
  const groups = GROUPS.map(([title, controls], i) => make("details", { open: i < 1 },
    make("summary", {}, title), make("div", { className: "fields" }, ...controls.map(field))));
  const reset = make("button", { type: "button", id: "reset", className: "quiet" }, "Back to the defaults");
  reset.addEventListener("click", () => setOptions(START));
  find("options").append(first, ...groups, reset);
  setOptions(START);
}

/** Shows what holds where nothing is said: the model's own defaults, else the neutral values. */
export function showDefaults(defaults) {
  for (const { name, kind } of ALL) {
    if (kind === "number" && name in defaults) control(name).placeholder = String(defaults[name]);
  }
}

/** The form as plain data: what was typed, by name; what is at its default is left out. */
export function getOptions() {
  const values = {};
  for (const { name, kind, start = false } of ALL) {
    if (kind === "flag") {
      if (control(name).checked !== start) values[name] = control(name).checked;
    } else if (control(name).value.trim()) values[name] = control(name).value;
  }
  const system = control("system").value;
  return system.trim() ? { ...values, system } : values;
}

export function setOptions(values) {
  for (const { name, kind, start = false } of ALL) {
    if (kind === "flag") control(name).checked = values[name] ?? start;
    else control(name).value = values[name] ?? "";
    control(name).dispatchEvent(new Event("change", { bubbles: true }));
  }
  control("system").value = values.system ?? "";
  for (const group of find("options").querySelectorAll("details")) {
    if ([...group.querySelectorAll("textarea")].some((each) => each.value)) group.open = true;
  }
}

/** The side panel's: options and history. */
export function tabs() {
  const pairs = [["tab-options", "options-panel"], ["tab-history", "history"]];
  const choose = (chosen) => {
    for (const [tab, panel] of pairs) {
      find(tab).setAttribute("aria-selected", String(tab === chosen));
      find(tab).tabIndex = tab === chosen ? 0 : -1;
      find(panel).hidden = tab !== chosen;
    }
  };
  for (const [i, [tab]] of pairs.entries()) {
    find(tab).addEventListener("click", () => choose(tab));
    find(tab).addEventListener("keydown", (event) => {
      if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
      const [other] = pairs[1 - i];
      choose(other);
      find(other).focus();
    });
  }
  const show = (open) => {
    document.body.classList.toggle("options-open", open);
    find("show-options").setAttribute("aria-expanded", String(open));
    (open ? find("tab-options") : find("show-options")).focus();
  };
  find("show-options").addEventListener("click", () => show(!document.body.classList.contains("options-open")));
  find("hide-options").addEventListener("click", () => show(false));
}

function read(own, text) {
  if (own.kind === "lines") return text.split("\n").filter(Boolean);
  if (own.kind === "number") {
    const value = Number(text);
    if (Number.isFinite(value) && (own.name !== "seed" || Number.isSafeInteger(value))) return value;
    throw new Error(`${own.label}: ${text} is no number that this page can keep`);
  }
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${own.label} is no JSON: ${error.message}`);
  }
}

/** The fields of a request that options ask for. Raises an Error that names what cannot be read. */
export function requestFields(options, mode) {
  const fields = {};
  for (const own of ALL) {
    const text = options[own.name];
    if (text === undefined || own.own || own.name === "evidence" || (own.chat && mode !== "chat")) continue;
    const value = own.kind === "flag" ? text : read(own, text);
    if (own.name === "schema") {
      fields.response_format = { type: "json_schema", json_schema: { name: "reply", schema: value } };
    } else fields[own.name] = value;
  }
  return fields;
}

/** What makes tokens tell of themselves. */
export function evidenceFields(options) {
  const ids = { return_token_ids: true, return_token_bytes: true };
  const asks = options.evidence ?? true;
  return asks ? { ...ids, certificate: true, draft: true, receipt: true } : ids;
}
