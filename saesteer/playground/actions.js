// What the user does, and what follows: requests are sent, answers come in, refusals find their place. Draws nothing.

import { compare, newAnswer, storedAnswer, strongest, take, textOf } from "./answers.js";
import {
  Refused,
  chat,
  findFeatures,
  firstOf,
  listDictionaries,
  listModels,
  promptLogprobs,
  setKey,
  url,
} from "./api.js";
import { curl, python } from "./code.js";
import { SIDES, bodyOf, readsOf, streamed, unsteered } from "./requests.js";
import { CHANGED, change, keyOf, newSlider, state } from "./state.js";

const FOUND = 8; // features that a search shows
const PAUSE = 150; // milliseconds that the pointer stays on a token before its features are named

let running = null; // the AbortController of the answers that are coming
let resting = 0;

// Shows the first stored case, then asks what the server has.
export async function start() {
  try {
    const { key, gallery } = await firstOf();
    change((s) => Object.assign(s, { keyNeeded: key, gallery }));
    if (gallery.length) load(gallery[0]);
  } catch (error) {
    told(error, (s, message) => (s.failure = message));
  }
  await connect();
}

// Asks what the server has; again when there is another key.
async function connect() {
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
  connect();
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
      value: String(known?.best?.value ?? (known?.max_act ? 2 : 1)),
    };
    s.sliders.push(newSlider(s.nextId++, added));
    s.status = `Slider ${s.sliders.length} added`;
  });
}

export function removeSlider(id) {
  change((s) => {
    const removed = s.sliders.find((one) => one.id === id);
    s.sliders = s.sliders.filter((one) => one !== removed);
    if (removed && s.colour?.dictionary && keyOf(s.colour) === keyOf(removed)) s.colour = CHANGED;
    s.status = "Slider removed";
  });
}

// Puts a stored case on the page: its slider, its question, and both of its answers as the newest run.
export function load(found) {
  const { name, dictionary, feature, label, max_act: maxAct, value, question } = found;
  change((s) => {
    const one = newSlider(s.nextId++, { dictionary, layer: null, feature, label, maxAct, value: String(value) });
    const words = (found.plain.match(/\s*\S+/g) ?? []).map((text) => [text]);
    const turn = {
      id: s.nextId++,
      user: question,
      history: { plain: [], steered: [] },
      plain: storedAnswer(words),
      steered: storedAnswer(found.steered, found),
      sliders: [one],
      stored: name,
    };
    s.turns = [...s.turns.filter((other) => !other.stored), turn];
    set(s, turn);
    turn.body = bodyOf(s, [{ role: "user", content: question }]);
    s.status = `${name}: the stored answers are shown`;
  });
}

// Puts the sliders and the question of a run back.
export function restore(turn) {
  change((s) => {
    set(s, turn);
    s.status = "Its sliders and its question are back";
  });
}

function set(s, { sliders, user }) {
  s.sliders = sliders.map((one) => ({ ...one, id: s.nextId++, error: "" }));
  Object.assign(s, { message: user, colour: CHANGED, token: null });
}

export function setSlider(id, part) {
  change((s) => Object.assign(s.sliders.find((one) => one.id === id) ?? {}, part, { error: "" }));
}

// Asks for both answers to the question at once; if they continue a run, each side has its own conversation.
export async function send() {
  if (state.busy || !state.model || !state.message.trim()) return;
  const user = state.message;
  const history = { plain: before("plain"), steered: before("steered") };
  const own = bodyOf(state, [...history.steered, { role: "user", content: user }]);
  const bodies = { plain: { ...own, messages: [...history.plain, own.messages.at(-1)] }, steered: own };
  const sent = state.sliders.map((one) => one.id);
  const reads = state.reads ? readsOf(state) : [];
  const answers = { plain: newAnswer(), steered: newAnswer() };
  const sliders = state.sliders.map((one) => ({ ...one }));
  const turn = { id: state.nextId, user, history, ...answers, sliders, body: own, stored: "" };
  running = new AbortController();
  change((s) => {
    s.turns.push(turn);
    Object.assign(s, {
      nextId: s.nextId + 1,
      message: s.continues ? "" : user,
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
  await mark(turn);
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
  change((s) => Object.assign(s, { turns: [], token: null, copied: null, status: "Runs cleared" }));
}

// The messages before the next question: none, or those of the newest run with its answer, if it has one.
function before(side) {
  const last = state.continues ? state.turns.at(-1) : undefined;
  if (!last) return [];
  if (last[side].error) return last.history[side];
  const said = { role: "assistant", content: textOf(last[side]) };
  return [...last.history[side], { role: "user", content: last.user }, said];
}

// Asks how likely each token of the steered answer is without the edits: the difference is what they changed.
async function mark({ steered, body }) {
  if (!body.saesteer.edits.length || steered.error || !steered.pieces.length) return;
  if (!steered.promptIds.length || !steered.ids.length) {
    change(() => (steered.unmarked = "the server has sent no token ids"));
    return;
  }
  try {
    const ids = [...steered.promptIds, ...steered.ids];
    const found = await promptLogprobs(unsteered(body.model, ids), running.signal);
    change(() => compare(steered, found));
  } catch (error) {
    if (error.name === "AbortError") return;
    told(error, (s, message) => (steered.unmarked = message));
  }
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
  const body = { ...turn.body, model: turn.body.model || state.model };
  const text = language === "curl" ? curl(body, url) : python(body, url);
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
