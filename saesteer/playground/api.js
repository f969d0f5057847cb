// The page's requests, all to the public API of the server that sent the page. Only this file knows the key.

const API = new URL("../v1/", document.baseURI);
const START = new URL("start.json", document.baseURI);

let key = ""; // in memory alone, until the page is closed

export const url = API.href.replace(/\/$/, "");

export function setKey(text) {
  key = text.trim();
}

// Why a request was refused: a sentence, the path of the wrong field if the server names one, and the HTTP status.
export class Refused extends Error {
  constructor(message, param, status) {
    super(message);
    this.param = param;
    this.status = status;
  }
}

// What the page begins with: whether the server has keys, and the stored cases that fit it.
export async function firstOf() {
  return json(START);
}

export async function listModels() {
  const { data } = await json("models");
  const ofModule = (one) => one.parent && one.id.startsWith(`${one.parent}:`); // steers the plain answer as well
  return data.filter((one) => !ofModule(one)).map((one) => one.id);
}

export async function listDictionaries() {
  return (await json("saesteer/dictionaries")).dictionaries;
}

// Features by words, or the one of a number.
export async function findFeatures(query) {
  const words = Object.entries(query).filter(([, value]) => value !== null && value !== undefined);
  return (await json(`saesteer/features?${new URLSearchParams(words)}`)).features;
}

// The logprob of each token of a prompt of ids, by id; null for the first.
export async function promptLogprobs(body, signal) {
  const response = await ask("completions", { method: "POST", body: JSON.stringify(body), signal });
  return (await response.json()).choices[0].prompt_logprobs;
}

// The events of a chat answer, as they come.
export async function* chat(body, signal) {
  const response = await ask("chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data: ") ? line.slice(6).trim() : "";
      if (!data || data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event.error) throw refusal(event, 200);
      yield event;
    }
  }
}

async function json(path) {
  return (await ask(path, {})).json();
}

async function ask(path, options) {
  const headers = options.body ? { "Content-Type": "application/json" } : {};
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(new URL(path, API), { ...options, headers, credentials: "omit", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(
      `The server does not answer, or the key holds what no header can carry (${error.message}).`,
      "",
      0,
    );
  }
  if (response.ok) return response;
  const found = await response.json().catch(() => null);
  throw refusal(found, response.status);
}

function refusal(found, status) {
  if (status === 401) return new Refused("The server asks for its API key.", "", status);
  const error = found?.error ?? found;
  const message = typeof error === "string" ? error : (error?.message ?? `The server answered with status ${status}.`);
  return new Refused(String(message), String(error?.param ?? ""), status);
}
