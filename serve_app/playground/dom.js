// Small helpers around the document: elements are made, never written as markup.

export const find = (id) => document.getElementById(id);

/** An element with properties and children; strings become text. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "on") for (const [event, run] of Object.entries(value)) element.addEventListener(event, run);
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Says something to those who hear the page; what went wrong is seen, too, until more is said. */
export function announce(text, wrong = false) {
  find("announce").textContent = text;
  find("announce").className = wrong ? "warning" : "unseen";
}

/** Copies a text; in the older way where the page came over plain HTTP. */
export async function copy(text, place = document.body) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = make("textarea", { value: text, className: "unseen" });
    const before = document.activeElement;
    place.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    before.focus();
  }
}

const NUMBER = new Intl.NumberFormat("en");
export const count = (value) => NUMBER.format(value);
export const percent = (share, digits = share > 0 && share < 0.01 ? 2 : 0) => `${(100 * share).toFixed(digits)} %`;

export function size(bytes) {
  if (bytes >= 1e9) return `${(bytes / 1e9).toFixed(2)} GB`;
  if (bytes >= 1e6) return `${(bytes / 1e6).toFixed(1)} MB`;
  return bytes >= 1e3 ? `${(bytes / 1e3).toFixed(1)} kB` : `${bytes} B`;
}

export const duration = (milliseconds) =>
  milliseconds >= 1000 ? `${(milliseconds / 1000).toFixed(2)} s` : `${milliseconds.toFixed(0)} ms`;

/** A token's text where it stands alone: what is no visible character has a name. */
export function visible(text) {
  if (text === "") return "(part of a character)";
  return text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/ /g, "␣");
}

const decoder = new TextDecoder();
export const textOf = (bytes) => decoder.decode(new Uint8Array(bytes));
