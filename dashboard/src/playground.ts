// Chat with the served model: streamed, stoppable, with its times shown.

import { request } from "./api";
import { byId, h, setText } from "./dom";
import { formatMs, formatNumber } from "./format";
import { readEvents } from "./sse";

interface Message {
  role: "system" | "user" | "assistant";
  content: string;
}

interface Chunk {
  choices?: { delta?: { content?: string; reasoning_content?: string }; finish_reason?: string }[];
  usage?: { completion_tokens: number; prompt_tokens: number };
  error?: { message: string };
}

const ENDS: Record<string, string> = { length: "cut off by the limit of tokens" };

export class Playground {
  private readonly form = byId<HTMLFormElement>("chat-form");
  private readonly input = byId<HTMLTextAreaElement>("chat-input");
  private readonly log = byId("chat-log");
  private readonly send = byId<HTMLButtonElement>("chat-send");
  private readonly stop = byId<HTMLButtonElement>("chat-stop");
  private readonly status = byId("chat-status");
  private readonly system = byId<HTMLTextAreaElement>("chat-system");
  private readonly temperature = byId<HTMLInputElement>("chat-temperature");
  private readonly maxTokens = byId<HTMLInputElement>("chat-max-tokens");
  private messages: Message[] = [];
  private running: AbortController | null = null;

  constructor() {
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      void this.ask();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      void this.ask();
    });
    this.stop.addEventListener("click", () => this.running?.abort());
    byId("chat-clear").addEventListener("click", () => this.clear());
    const shown = byId("chat-temperature-value");
    this.temperature.addEventListener("input", () => setText(shown, this.temperature.value));
  }

  private clear(): void {
    this.running?.abort();
    this.messages = [];
    this.log.replaceChildren();
    setText(this.status, "");
    this.input.focus();
  }

  private async ask(): Promise<void> {
    const text = this.input.value.trim();
    if (!text || this.running) return;
    const messages = this.messages;
    messages.push({ role: "user", content: text });
    this.show("user", text);
    this.input.value = "";
    const reply = new Reply();
    this.log.append(reply.element);
    this.scroll();
    this.running = new AbortController();
    this.setBusy(true);
    try {
      await this.stream(messages, reply, this.running.signal);
    } catch (error) {
      if (this.running.signal.aborted) reply.end = "stopped";
      else reply.fail(error instanceof Error ? error.message : String(error));
    } finally {
      this.running = null;
      this.setBusy(false);
      reply.finish();
      setText(this.status, reply.summary());
    }
    if (reply.text) messages.push({ role: "assistant", content: reply.text });
    else messages.pop();
  }

  private async stream(messages: Message[], reply: Reply, signal: AbortSignal): Promise<void> {
    const system = this.system.value.trim();
    const opening: Message[] = system ? [{ role: "system", content: system }] : [];
    const limit = Number(this.maxTokens.value);
    const response = await request("v1/chat/completions", {
      method: "POST",
      signal,
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({
        messages: [...opening, ...messages],
        stream: true,
        stream_options: { include_usage: true, continuous_usage_stats: true },
        temperature: Number(this.temperature.value),
        ...(limit > 0 ? { max_tokens: limit } : {}),
      }),
    });
    if (!response.body) throw new Error("the server sent no answer");
    for await (const data of readEvents(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data) as Chunk;
      if (chunk.error) throw new Error(chunk.error.message);
      const isAtEnd = this.isAtEnd();
      reply.take(chunk);
      if (isAtEnd) this.scroll();
      setText(this.status, reply.summary());
    }
    throw new Error("the answer broke off");
  }

  private setBusy(isBusy: boolean): void {
    const hadFocus = document.activeElement;
    this.stop.disabled = !isBusy;
    this.send.disabled = isBusy;
    this.log.setAttribute("aria-busy", String(isBusy));
    if (hadFocus === this.send || hadFocus === this.stop) this.input.focus();
  }

  private show(role: string, text: string): void {
    this.log.append(h("div", { class: `message ${role}` }, h("div", { class: "said" }, text)));
  }

  private isAtEnd(): boolean {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
  }

  private scroll(): void {
    this.log.scrollTop = this.log.scrollHeight;
  }
}

/** One answer as it arrives. */
class Reply {
  readonly element: HTMLElement;
  text = "";
  end = "";
  private readonly said = h("div", { class: "said" });
  private readonly thought = h("div", { class: "thought" });
  private readonly thinking = h(
    "details",
    { class: "thinking", hidden: true },
    h("summary", {}, "Reasoning"),
    this.thought,
  );
  private readonly note = h("div", { class: "note" });
  private readonly sent = performance.now();
  private first = 0;
  private last = 0;
  private numFirst = 0;
  private numTokens = 0;

  constructor() {
    this.element = h("div", { class: "message assistant" }, this.thinking, this.said, this.note);
    this.said.classList.add("waiting");
  }

  take(chunk: Chunk): void {
    const choice = chunk.choices?.[0];
    const { content, reasoning_content: reasoning } = choice?.delta ?? {};
    if (chunk.usage) this.numTokens = chunk.usage.completion_tokens;
    if (content || reasoning) {
      this.last = performance.now();
      if (!this.first) {
        this.first = this.last;
        this.numFirst = Math.max(1, this.numTokens);
        this.said.classList.remove("waiting");
      }
    }
    if (reasoning) {
      this.thinking.hidden = false;
      this.thought.append(reasoning);
    }
    if (content) {
      this.text += content;
      this.said.append(content);
    }
    const reason = choice?.finish_reason;
    if (reason) this.end = ENDS[reason] ?? "";
  }

  fail(message: string): void {
    this.end = `failed: ${message}`;
    this.element.classList.add("failed");
  }

  finish(): void {
    this.said.classList.remove("waiting");
    this.said.normalize();
    setText(this.note, this.summary());
  }

  /** "first token 84 ms · 212 tok/s · 128 tokens". */
  summary(): string {
    const parts: string[] = [];
    if (this.first) {
      parts.push(`first token ${formatMs(this.first - this.sent)}`);
      const seconds = (this.last - this.first) / 1000;
      const numAfter = this.numTokens - this.numFirst;
      if (numAfter > 0 && seconds > 0) parts.push(`${formatNumber(numAfter / seconds)} tok/s`);
      parts.push(`${formatNumber(this.numTokens)} tokens`);
    }
    if (this.end) parts.push(this.end);
    return parts.join(" · ");
  }
}
