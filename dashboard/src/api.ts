// Requests to the server that the page came from, with the key of this tab if it wants one.

const STORED = "caudal.key";

export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

export function getKey(): string {
  return sessionStorage.getItem(STORED) ?? "";
}

export function setKey(key: string): void {
  if (key) sessionStorage.setItem(STORED, key);
  else sessionStorage.removeItem(STORED);
}

/** Paths are relative to the page, so that a proxy may put the server under a prefix. */
export async function request(path: string, init: RequestInit = {}): Promise<Response> {
  const headers = new Headers(init.headers);
  if (getKey()) headers.set("Authorization", `Bearer ${getKey()}`);
  const response = await fetch(path, { ...init, headers, cache: "no-store" });
  if (response.ok) return response;
  let message = `HTTP ${response.status}`;
  try {
    const body = (await response.json()) as { error?: { message?: string } };
    message = body.error?.message ?? message;
  } catch {
    // Not an answer of ours; the status has to do.
  }
  throw new ApiError(response.status, message);
}

export async function getJson<T>(path: string, timeoutMs = 10_000): Promise<T> {
  const response = await request(path, { signal: AbortSignal.timeout(timeoutMs) });
  return (await response.json()) as T;
}
