// How the page speaks to the server: JSON, streams of events, and the key where one is needed.

let askKey = async () => "";
let key = sessionStorage.getItem("steerpipe.key") || "";

export function onKeyWanted(ask) { askKey = ask; }

export function currentKey() { return key; }

async function send(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  const answer = await fetch(path, { ...options, headers });
  if (answer.status !== 401) return answer;
  const used = key;
  const given = await askKey();
  if (!given || given === used) return answer;
  key = given;
  sessionStorage.setItem("steerpipe.key", key);
  return send(path, options);
}

async function refuse(answer) {
  let message = `${answer.status} ${answer.statusText}`;
  try { message = (await answer.json()).error.message; } catch { /* no JSON: the status has to do */ }
  throw new Error(message);
}

export async function getJson(path) {
  const answer = await send(path);
  return answer.ok ? answer.json() : refuse(answer);
}

function posted(body, signal) {
  return { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal };
}

export async function postJson(path, body) {
  const answer = await send(path, posted(body));
  return answer.ok ? answer.json() : refuse(answer);
}

/** The objects of a stream of server-sent events, as they come. With a body it is a POST. */
export async function* events(path, { body, signal } = {}) {
  const answer = await send(path, body ? posted(body, signal) : { signal });
  if (!answer.ok) await refuse(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  }
}
