// The message that is being typed: edits go to the server, warmth comes back, and Enter makes a request of it.
// Where there is no line for drafts, the message is sent whole when it is complete.

import { currentKey, events } from "/page/api.js";
import { formatBytes } from "/page/panel.js";

const LOST = "The connection was lost before the answer was complete.";

export class Draft {
  constructor(bar, words) {
    Object.assign(this, { bar, words, hint: words.textContent, enabled: true, savedMs: 0 });
    this.socket = null;
    this.refused = true; // until the server says that it takes drafts
    this.forget();
  }

  /** The text is another now; `before` are the turns before it. */
  type(text, before) {
    if (!this.enabled || this.refused || (!text && !this.open)) return this.rest();
    if (!text) {
      this.send({ type: "close" });
      this.forget();
      return this.rest();
    }
    if (!this.socket) return this.connect(text, before);
    if (this.socket.readyState !== WebSocket.OPEN) return this.wanted = { text, before };
    if (!this.open || this.turns !== before.length) this.begin(before);
    this.edit(text);
  }

  /** The answer's chunks, as they come. */
  async *submit(text, before, signal) {
    this.savedMs = 0;
    this.rest();
    if (!this.enabled || !this.open || this.turns !== before.length) {
      const messages = [...before, { role: "user", content: text }];
      yield* events("/v1/chat/completions", { body: { messages, stream: true }, signal });
      return;
    }
    this.inbox = [];
    this.send({ type: "submit", text });
    this.forget();
    signal.addEventListener("abort", () => this.send({ type: "stop" }));
    for (;;) {
      const message = await this.next();
      if (message.type === "submitted") this.savedMs = message.saved_ms || 0;
      else if (message.type === "chunk") yield message.chunk;
      else if (message.type === "done" || message.type === "stopped") break;
      else if (message.type === "error") throw new Error(message.error.message);
    }
    if (signal.aborted) throw new DOMException("stopped", "AbortError");
  }

  // --- the line

  connect(text, before) {
    this.wanted = { text, before };
    const socket = this.socket = new WebSocket(`${location.origin.replace(/^http/, "ws")}/v1/drafts`);
    socket.addEventListener("open", () => {
      this.begin(this.wanted.before);
      this.edit(this.wanted.text);
    });
    socket.addEventListener("message", ({ data }) => this.heard(JSON.parse(data)));
    socket.addEventListener("close", () => {
      this.socket = null;
      this.forget();
      this.rest();
      this.deliver({ type: "error", error: { message: LOST } });
    });
  }

  begin(before) {
    this.send({ type: "open", messages: before, ...(currentKey() && { key: currentKey() }) });
    Object.assign(this, { open: true, turns: before.length, sent: [] });
  }

  /** One edit that makes the text that was sent this one. Positions count code points. */
  edit(text) {
    const [old, now] = [this.sent, Array.from(text)];
    let at = 0;
    while (at < old.length && at < now.length && old[at] === now[at]) at++;
    let end = 0;
    while (end < old.length - at && end < now.length - at && old.at(-1 - end) === now.at(-1 - end)) end++;
    const change = { at, remove: old.length - at - end, insert: now.slice(at, now.length - end).join("") };
    this.sent = now;
    if (change.remove || change.insert) this.send({ type: "edit", edits: [change] });
  }

  send(message) {
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message));
  }

  heard(message) {
    if (message.type === "warmth" && this.open) this.show(message);
    else if (message.type === "expired" || message.type === "superseded") this.forget();
    else if (message.type === "error" && this.open) this.forget(); // Enter will say what is wrong
    if (message.type !== "warmth" && message.type !== "opened") this.deliver(message);
  }

  deliver(message) {
    this.inbox.push(message);
    this.waiting?.();
  }

  async next() {
    while (!this.inbox.length) {
      if (!this.socket) throw new Error(LOST);
      await new Promise((come) => { this.waiting = come; });
    }
    return this.inbox.shift();
  }

  forget() {
    Object.assign(this, { open: false, turns: 0, sent: [], inbox: this.inbox || [] });
  }

  // --- what is seen of it

  show(warmth) {
    const { typed_tokens: typed, prefilled_tokens: ready, speculated_tokens: begun } = warmth;
    const share = begun ? 1 : typed ? Math.min(1, ready / typed) : 0;
    const words = [`${Math.min(ready, typed)} of ${typed} tokens computed`];
    if (warmth.too_long) words.push("too long for the context");
    if (warmth.crowded) words.push("waits for room beside other drafts");
    if (warmth.experts_expected) words.push(`${warmth.experts_ready} of ${warmth.experts_expected} experts ready`);
    if (warmth.bytes_in_flight) words.push(`${formatBytes(warmth.bytes_in_flight)} on the way`);
    if (begun) words.push(`answer begun (${begun})`);
    if (warmth.saved_ms >= 1) words.push(`${Math.round(warmth.saved_ms)} ms computed before Enter`);
    this.paint(share, words.join(" · "));
  }

  rest() { this.paint(0, this.hint); }

  paint(share, words) {
    const percent = Math.round(100 * share);
    this.bar.firstElementChild.style.width = `${percent}%`;
    this.bar.setAttribute("aria-valuenow", percent);
    this.bar.setAttribute("aria-valuetext", words);
    this.words.textContent = words;
  }
}
