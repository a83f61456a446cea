// What is asked of the server, with the key, and what a stream of events holds.

let key = ""; // in memory alone
let askForKey = null;
let asking = null; // the one question that is open

/** `ask` shows that a key is needed (or was refused) and returns one. */
export function keysComeFrom(ask) {
  askForKey = ask;
}

export class Refusal extends Error {
  constructor(status, error) {
    super(error.message ?? `The server answers with ${status}`);
    this.parameter = error.param ?? null;
  }
}

async function told(response) {
  try {
    return (await response.json()).error ?? {};
  } catch {
    return {};
  }
}

/** A response of the server; a key is asked for where it wants one. */
export async function ask(path, body = undefined, signal = undefined) {
  for (;;) {
    const headers = body === undefined ? {} : { "Content-Type": "application/json" };
    const given = key;
    if (given) headers.Authorization = `Bearer ${given}`;
    const method = body === undefined ? "GET" : "POST";
    const content = body === undefined ? undefined : JSON.stringify(body);
    const response = await fetch(path, { method, headers, body: content, signal });
    if (response.ok) return response;
    const error = await told(response);
    if (response.status !== 401 || askForKey === null) throw new Refusal(response.status, error);
    if (key !== given) continue; // another request has asked meanwhile
    asking ??= askForKey(given !== "").finally(() => (asking = null));
    key = await asking;
  }
}

export const json = async (...asked) => (await ask(...asked)).json();

/** The events of a stream, as they come. Raises a `Refusal` for one that tells of a failure. */
export async function* events(path, body, signal) {
  const response = await ask(path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The connection broke off");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    const batch = [];
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") {
        if (batch.length) yield batch;
        return;
      }
      const event = JSON.parse(data);
      if (event.error) {
        if (batch.length) yield batch;
        throw new Refusal(500, event.error);
      }
      batch.push(event);
    }
    if (batch.length) yield batch;
  }
}
