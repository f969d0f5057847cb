// From sliders and fields to the bodies of requests. Checks nothing: the server does, and names the field.

const STRONGEST = 8; // features of each token
const ONLY_READ = "mlp_in_pregain."; // no edit stands there, so there is nothing after it
const SCOPES = {
  all: undefined,
  prompt: { prompt: true },
  user: { messages: "user" },
  generated: { generated: true },
};

export const SIDES = ["plain", "steered"];

// Whether the value is in multiples of the feature's largest known activation.
export function inMaxAct(slider) {
  return slider.maxAct !== null && slider.mode !== "scale";
}

export function editOf(slider) {
  const { dictionary, layer, feature, mode } = slider;
  const edit = { op: "clamp", dictionary };
  if (layer !== null) edit.layer = layer;
  edit.feature = feature;
  edit.value = number(slider.value);
  if (inMaxAct(slider)) edit.unit = "max_act";
  if (mode !== "set") edit.mode = mode;
  const scope = SCOPES[slider.scope];
  if (scope) edit.scope = scope;
  return edit;
}

// The dictionaries of the sliders, of the search and of the colour, with the features that are looked at.
export function readsOf({ sliders, search, colour, dictionaries }) {
  const readable = new Map(dictionaries.filter((one) => one.readable).map((one) => [one.dictionary, one.site]));
  const wanted = new Map();
  const searched = search.dictionary ? [{ dictionary: search.dictionary, layer: search.layer }] : [];
  for (const one of [...sliders, ...(colour?.dictionary ? [colour] : []), ...searched]) {
    if (!readable.has(one.dictionary)) continue;
    const key = JSON.stringify([one.dictionary, one.layer]);
    if (!wanted.has(key)) wanted.set(key, { dictionary: one.dictionary, layer: one.layer, features: new Set() });
    if (one.feature !== undefined) wanted.get(key).features.add(one.feature);
  }
  return [...wanted.values()].map(({ dictionary, layer, features }) => ({
    dictionary,
    ...(layer === null ? {} : { layer }),
    top_k: STRONGEST,
    ...(features.size ? { features: [...features] } : {}),
    at: readable.get(dictionary)?.startsWith(ONLY_READ) ? "before" : "after",
  }));
}

// What a person would send for the steered answer.
export function bodyOf(state, messages) {
  return {
    model: state.model,
    messages,
    max_tokens: number(state.maxTokens),
    temperature: number(state.temperature),
    repetition_penalty: number(state.penalty),
    saesteer: { edits: state.sliders.map(editOf), return: { dose: true } },
  };
}

// The same as a stream with read-outs; the plain one has no edits, not even the server's own.
export function streamed(body, side, reads) {
  const returns = reads.length ? { features: reads } : {};
  const saesteer =
    side === "plain"
      ? { defaults: false, return: returns }
      : { ...body.saesteer, return: { ...body.saesteer.return, ...returns } };
  // The usage of each chunk says which tokens it brings, logprobs what each of them is, and ids which they are.
  const stream_options = { include_usage: true, continuous_usage_stats: true };
  return { ...body, saesteer, stream: true, stream_options, logprobs: true, return_token_ids: true };
}

// The same tokens as a prompt without edits, for their probabilities there.
export function unsteered(model, ids) {
  const saesteer = { defaults: false };
  return { model, prompt: ids, max_tokens: 1, temperature: 0, prompt_logprobs: 0, saesteer };
}

// An empty field becomes null, which the server refuses by name.
function number(text) {
  return text.trim() === "" ? null : Number(text);
}
