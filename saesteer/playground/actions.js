// What the user does, and what follows: requests are sent, answers come in, refusals find their place. Draws nothing.

import { newAnswer, strongest, take, textOf } from "./answers.js";
import { Refused, chat, findFeatures, listDictionaries, listModels, setKey, url } from "./api.js";
import { curl, python } from "./code.js";
import { SIDES, bodyOf, readsOf, streamed } from "./requests.js";
import { change, keyOf, newSlider, state } from "./state.js";

const FOUND = 8; // features that a search shows
const PAUSE = 150; // milliseconds that the pointer stays on a token before its features are named

let running = null; // the AbortController of the answers that are coming
let resting = 0;

// Asks what the server has; again when there is another key.
export async function start() {
  try {
    const [models, dictionaries] = await Promise.all([listModels(), listDictionaries()]);
    change((s) => {
      Object.assign(s, { models, dictionaries, keyWanted: false, failure: "" });
      if (!models.includes(s.model)) s.model = models[0] ?? "";
      if (!dictionaries.some((one) => one.dictionary === s.search.dictionary))
        choose(s, dictionaries[0]?.dictionary ?? "");
    });
  } catch (error) {
    told(error, (s, message) => (s.failure = message));
  }
}

export function useKey(text) {
  setKey(text);
  start();
}

// Puts an error's sentence where `put` wants it, and asks for the key if that is what is missing.
function told(error, put) {
  if (!(error instanceof Refused)) throw error;
  change((s) => {
    if (error.status === 401) s.keyWanted = true;
    put(s, error.message);
  });
}

export function chooseDictionary(name) {
  change((s) => choose(s, name));
}

function choose(s, name) {
  const layers = s.dictionaries.find((one) => one.dictionary === name)?.layers ?? null;
  s.search = { ...s.search, dictionary: name, layer: layers?.[0] ?? null, results: null, error: "" };
}

export async function search() {
  const { dictionary, layer, words } = state.search;
  const number = words.trim().match(/^#?(\d+)$/)?.[1];
  const query = { dictionary, layer, ...(number ? { feature: number } : { q: words, limit: FOUND }) };
  change((s) => Object.assign(s.search, { busy: true, error: "" }));
  try {
    const results = (await findFeatures(query)).map((one) => ({ ...one, dictionary, layer }));
    change((s) => {
      s.search.results = results;
      s.status = results.length === 1 ? "1 feature found" : `${results.length} features found`;
      for (const one of results) s.labels.set(keyOf(one), one);
    });
  } catch (error) {
    told(error, (s, message) => Object.assign(s.search, { results: null, error: message }));
  } finally {
    change((s) => (s.search.busy = false));
  }
}

export function addSlider(feature) {
  change((s) => {
    const known = s.labels.get(keyOf(feature));
    const { dictionary, layer } = feature;
    const added = {
      dictionary,
      layer,
      feature: feature.feature,
      label: known?.label ?? "",
      maxAct: known?.max_act ?? null,
    };
    s.sliders.push(newSlider(s.nextId++, added));
    s.colour ??= { dictionary, layer, feature: feature.feature };
    s.status = `Slider ${s.sliders.length} added`;
  });
}

export function removeSlider(id) {
  change((s) => {
    s.sliders = s.sliders.filter((one) => one.id !== id);
    s.status = "Slider removed";
  });
}

export function setSlider(id, part) {
  change((s) => Object.assign(s.sliders.find((one) => one.id === id) ?? {}, part, { error: "" }));
}

// Asks for both answers to the message at once; each side has its own conversation.
export async function send() {
  if (state.busy || !state.model || !state.message.trim()) return;
  const user = state.message;
  const own = bodyOf(state, talk("steered", user));
  const bodies = { plain: { ...own, messages: talk("plain", user) }, steered: own };
  const sent = state.sliders.map((one) => one.id);
  const reads = state.reads ? readsOf(state) : [];
  const turn = { id: state.nextId, user, plain: newAnswer(), steered: newAnswer(), body: own };
  running = new AbortController();
  change((s) => {
    s.turns.push(turn);
    Object.assign(s, {
      nextId: s.nextId + 1,
      message: "",
      busy: true,
      readError: "",
      token: null,
      status: "Answering",
    });
    for (const one of s.sliders) one.error = "";
  });
  await Promise.all(
    SIDES.map((side) => answer(turn[side], streamed(bodies[side], side, reads), side === "steered" ? sent : [])),
  );
  running = null;
  change((s) => {
    s.busy = false;
    const refused = SIDES.filter((side) => turn[side].error);
    s.status = refused.length ? `No ${refused.join(" and no ")} answer` : "Both answers are complete";
  });
}

export function stop() {
  running?.abort();
}

export function clear() {
  change((s) => Object.assign(s, { turns: [], token: null, copied: null, status: "Conversation cleared" }));
}

function talk(side, user) {
  const before = state.turns.filter((turn) => !turn[side].error);
  return [
    ...before.flatMap((turn) => [
      { role: "user", content: turn.user },
      { role: "assistant", content: textOf(turn[side]) },
    ]),
    { role: "user", content: user },
  ];
}

async function answer(into, body, sent) {
  try {
    for await (const event of chat(body, running.signal)) change(() => take(into, event));
  } catch (error) {
    if (error.name !== "AbortError") {
      const why = error instanceof Refused ? error : new Refused(`The answer broke off (${error.message}).`, "", 0);
      told(why, (s, message) => place(s, into, message, why.param, sent));
    }
  }
  change(() => (into.ended = true));
}

// A refusal of an edit belongs to its slider, one of what is read to the choice of reading, others to the answer.
function place(s, into, message, param, sent) {
  const edit = param.match(/^saesteer\.edits\[(\d+)\]/);
  const slider = edit && s.sliders.find((one) => one.id === sent[Number(edit[1])]);
  into.error = message;
  if (slider) {
    slider.error = message;
    into.error = `Refused because of slider ${1 + s.sliders.indexOf(slider)}; the reason stands there.`;
  } else if (param.startsWith("saesteer.return")) {
    s.readError = message;
  }
}

// Shows a token's features, while the pointer is there or, once pinned, until another is chosen.
export function showToken(turn, side, index, pinned) {
  if (!pinned && state.token?.pinned) return;
  change((s) => (s.token = { turn, side, index, pinned }));
  clearTimeout(resting);
  resting = setTimeout(nameFeatures, pinned ? 0 : PAUSE);
}

export function hideToken() {
  change((s) => (s.token = null));
}

// Asks for the labels of the features that are shown, once for each.
function nameFeatures() {
  const shown = state.token && state.turns.find((turn) => turn.id === state.token.turn)?.[state.token.side];
  if (!shown) return;
  for (const one of strongest(shown, shown.pieces[state.token.index])) {
    if (state.labels.has(keyOf(one))) continue;
    state.labels.set(keyOf(one), null);
    findFeatures({ dictionary: one.dictionary, layer: one.layer, feature: one.feature })
      .then(([found]) => found && change((s) => s.labels.set(keyOf(one), found)))
      .catch((error) => error instanceof Refused || Promise.reject(error)); // without a label it is a number
  }
}

export function colourBy(feature) {
  change((s) => (s.colour = feature));
}

// Puts a turn's request into the clipboard, and on the page, where it can be read and copied by hand.
export async function copy(turn, language) {
  const text = language === "curl" ? curl(turn.body, url) : python(turn.body, url);
  let done = true;
  try {
    await navigator.clipboard.writeText(text); // absent where the page came by plain HTTP from another machine
  } catch {
    done = false;
  }
  change((s) => {
    s.copied = { turn: turn.id, text, done };
    s.status = done ? "Copied" : "The browser does not allow copying; the code is on the page";
  });
}
