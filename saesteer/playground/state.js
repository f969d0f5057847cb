// What the page shows, and the one way to change it. Knows no server and no HTML.

export const CHANGED = "changed"; // tokens are coloured by what the sliders changed

export const state = {
  models: [], // ids
  model: "",
  dictionaries: [], // as the server lists them
  keyNeeded: false, // the server has keys
  keyWanted: false, // it has refused a request without one
  failure: "", // why the page has nothing to show

  gallery: [], // stored cases, as data/gallery.json has them: those that fit this server

  search: { dictionary: "", layer: null, words: "", busy: false, results: null, error: "" },
  sliders: [], // see newSlider
  nextId: 1,

  message: "",
  maxTokens: "64",
  temperature: "0",
  penalty: "1.1",
  reads: true, // whether answers bring the features of their tokens
  readError: "",
  continues: false, // whether the next question follows the newest run
  // {id, user, history: the messages before it by side, plain, steered: answers, sliders: copies of what made it,
  // body: what asked for the steered one, stored: the name of its case or ""}
  turns: [],
  busy: false,
  status: "", // what screen readers are told

  colour: CHANGED, // or the feature that colours tokens, or null
  token: null, // the one whose features are shown: {turn, side, index, pinned}
  labels: new Map(), // what is known of features, by key; null while the server is asked
  copied: null, // {turn, text, done}: the code of a turn, and whether it is in the clipboard
};

let render = () => {};
let waiting = false;

// Draws now, and after every change from now on.
export function draw(how) {
  render = how;
  render();
}

// Applies a change. All changes of a frame are drawn once.
export function change(apply) {
  apply(state);
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    render();
  });
}

// A feature as text, for maps: dictionary, layer or null, number.
export function keyOf({ dictionary, layer, feature }) {
  return JSON.stringify([dictionary, layer ?? null, feature]);
}

// As a person reads it: demo 3497, or scope@9 34.
export function nameOf({ dictionary, layer, feature }) {
  return `${dictionary}${layer === null || layer === undefined ? "" : `@${layer}`} ${feature}`;
}

// A clamp of a feature, as the form of a slider holds it: numbers are the text that stands there.
export function newSlider(id, { dictionary, layer, feature, label, maxAct, value }) {
  return { id, dictionary, layer, feature, label, maxAct, value, mode: "set", scope: "all", error: "" };
}
