// A request as a link, a curl command or a program: with its seed it gives the same text again.

import { announce, copy, find } from "./dom.js";

const quoted = (text) => `'${text.replace(/'/g, "'\\''")}'`;

function encoded(data) {
  const bytes = new TextEncoder().encode(JSON.stringify(data));
  const letters = Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
  return btoa(letters).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
}

/** What the page's address holds after its `#`; null where that is nothing of ours. */
export function fromAddress() {
  try {
    const letters = atob(location.hash.slice(1).replace(/-/g, "+").replace(/_/g, "/"));
    const data = JSON.parse(new TextDecoder().decode(Uint8Array.from(letters, (each) => each.charCodeAt(0))));
    return data && typeof data === "object" && typeof data.text === "string" ? data : null;
  } catch {
    return null;
  }
}

const asPython = (value, depth = 1) => {
  const inner = "    ".repeat(depth + 1);
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const [begin, end] = Array.isArray(value) ? "[]" : "{}";
  const entries = Array.isArray(value)
    ? value.map((each) => asPython(each, depth + 1))
    : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${asPython(each, depth + 1)}`);
  const line = begin + entries.join(", ") + end;
  return line.length < 70 ? line : `${begin}\n${entries.map((each) => `${inner}${each},\n`).join("")}${"    ".repeat(depth)}${end}`;
};

// What the `openai` package knows by name; the rest goes into `extra_body`.
const KNOWN = new Set(["model", "messages", "prompt", "temperature", "top_p", "seed", "n", "max_tokens", "stop",
  "presence_penalty", "frequency_penalty", "logit_bias", "response_format", "tools", "stream"]);

function python(path, body, hasKey) {
  const chat = path.includes("chat");
  const known = ([name]) => KNOWN.has(name) && (chat || name !== "response_format");
  const own = Object.entries(body).filter(known).map(([name, value]) => `    ${name}=${asPython(value)},\n`);
  const more = Object.fromEntries(Object.entries(body).filter((each) => !known(each)));
  if (Object.keys(more).length) own.push(`    extra_body=${asPython(more)},\n`);
  const key = hasKey ? 'os.environ["API_KEY"]' : '"none"';
  return `${hasKey ? "import os\n\n" : ""}from openai import OpenAI\n\n` +
    `client = OpenAI(base_url=${JSON.stringify(new URL("v1", document.baseURI).href)}, api_key=${key})\n` +
    `reply = client.${chat ? "chat.completions" : "completions"}.create(\n${own.join("")})\n` +
    `print(reply.choices[0].${chat ? "message.content" : "text"})\n`;
}

function curl(path, body, hasKey) {
  const key = hasKey ? `  -H "Authorization: Bearer $API_KEY" \\\n` : "";
  return `curl ${new URL(path, document.baseURI).href} \\\n${key}  -H 'Content-Type: application/json' \\\n` +
    `  -d ${quoted(JSON.stringify(body, null, 2))}\n`;
}

/** Opens the dialog; `request` returns what it is about: `{data, path, body, hasKey}`. */
export function startSharing(request) {
  const dialog = find("share-dialog");
  const show = () => {
    const { data, path, body, hasKey } = request();
    const link = `${location.origin}${location.pathname}#${encoded(data)}`;
    const forms = { link: () => link, curl: () => curl(path, body, hasKey), python: () => python(path, body, hasKey) };
    find("share-text").textContent = forms[dialog.querySelector("input:checked").value]();
  };
  find("share").addEventListener("click", () => {
    try {
      show();
      dialog.showModal();
    } catch (error) {
      announce(error.message, true);
    }
  });
  for (const input of dialog.querySelectorAll("input")) input.addEventListener("change", show);
  find("share-close").addEventListener("click", () => dialog.close());
  find("share-copy").addEventListener("click", async () => {
    await copy(find("share-text").textContent, dialog);
    find("share-copy").textContent = "Copied";
    setTimeout(() => (find("share-copy").textContent = "Copy"), 1500);
  });
}
