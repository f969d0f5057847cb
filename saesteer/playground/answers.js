// Puts an answer together from the events of its stream: pieces of text, and the features of their tokens.

export function newAnswer() {
  return {
    pieces: [], // {text, positions}: usually one token; several where their text cannot be told apart
    held: [], // positions of tokens whose text is yet to come
    tokens: 0, // so far
    promptIds: [],
    ids: [],
    logprobs: [], // of the ids, as the answer was made
    changes: new Map(), // by position: log10 of how many times likelier the edits made the token
    unmarked: "", // why they could not be compared
    cut: false, // by the limit of tokens
    rows: new Map(), // by dictionary and layer: by position what was read there
    dose: [],
    applied: [],
    error: "",
    ended: false,
  };
}

// A stored one, whose pieces are texts, or texts with what the edits changed.
export function storedAnswer(pieces, { dose = [], applied = [] } = {}) {
  const one = { ...newAnswer(), dose, applied, ended: true };
  for (const [at, [text, change]] of pieces.entries()) {
    one.pieces.push({ text, positions: [at] });
    if (change !== undefined) one.changes.set(at, change);
  }
  return one;
}

export function textOf(answer) {
  return answer.pieces.map((piece) => piece.text).join("");
}

// Adds what an event brings.
export function take(answer, event) {
  const choice = event.choices?.[0];
  if (event.prompt_token_ids) answer.promptIds = event.prompt_token_ids;
  if (choice) addText(answer, choice, event.usage);
  const found = event.saesteer ?? {};
  for (const one of found.features ?? []) {
    const key = JSON.stringify([one.dictionary, one.layer ?? null]);
    if (!answer.rows.has(key)) answer.rows.set(key, new Map());
    for (const row of one.rows) answer.rows.get(key).set(row.position, row);
  }
  if (found.applied) answer.applied = found.applied;
  if (found.dose) answer.dose = found.dose;
}

function addText(answer, choice, usage) {
  const text = choice.delta?.content ?? "";
  const count = usage ? usage.completion_tokens - answer.tokens : 0;
  const first = usage ? usage.prompt_tokens + answer.tokens : 0;
  const positions = Array.from({ length: count }, (_, n) => first + n);
  answer.tokens += count;
  const content = choice.logprobs?.content ?? [];
  const tokens = content.map((one) => one.token);
  answer.ids.push(...(choice.token_ids ?? []));
  answer.logprobs.push(...content.map((one) => one.logprob));
  if (choice.finish_reason === "length") answer.cut = true;
  if (!text) {
    answer.held.push(...positions);
  } else if (!answer.held.length && tokens.length === count && tokens.join("") === text) {
    tokens.forEach((token, n) => answer.pieces.push({ text: token, positions: [positions[n]] }));
  } else {
    answer.pieces.push({ text, positions: [...answer.held, ...positions] });
    answer.held = [];
  }
}

// Compares the answer's tokens with what each prompt position had without edits.
export function compare(answer, logprobs) {
  for (const [n, id] of answer.ids.entries()) {
    const at = answer.promptIds.length + n;
    const plain = logprobs?.[at]?.[id]?.logprob;
    if (plain !== undefined && answer.logprobs[n] !== undefined)
      answer.changes.set(at, (answer.logprobs[n] - plain) / Math.LN10);
  }
}

// Log10 of how many times likelier the edits made a piece; null if it was not compared.
export function changeAt(answer, piece) {
  const found = piece.positions.map((at) => answer.changes.get(at)).filter((one) => one !== undefined);
  return found.length ? found.reduce((sum, one) => sum + one, 0) : null;
}

// The largest activation of a feature on the tokens of a piece; null if nothing was read there.
export function valueAt(answer, piece, { dictionary, layer, feature }) {
  const rows = rowsAt(answer.rows.get(JSON.stringify([dictionary, layer ?? null])), piece);
  return rows.length ? Math.max(...rows.map((row) => valueIn(row, feature))) : null;
}

// Those of the strongest features that are below the first few of a token count as 0.
function valueIn(row, feature) {
  return row.features?.[feature] ?? row.top?.find(([one]) => one === feature)?.[1] ?? 0;
}

// The strongest features of a piece: for each dictionary the strongest first.
export function strongest(answer, piece) {
  const found = [];
  for (const [key, rows] of answer.rows) {
    const [dictionary, layer] = JSON.parse(key);
    const values = new Map();
    for (const [feature, value] of rowsAt(rows, piece).flatMap((row) => row.top ?? [])) {
      values.set(feature, Math.max(value, values.get(feature) ?? -Infinity));
    }
    const sorted = [...values].sort(([, one], [, other]) => other - one);
    found.push(...sorted.map(([feature, value]) => ({ dictionary, layer, feature, value })));
  }
  return found;
}

function rowsAt(rows, piece) {
  return piece.positions.map((at) => rows?.get(at)).filter(Boolean);
}

// The largest activation of a feature in any answer, which has the strongest colour.
export function mostOf(turns, feature) {
  const values = turns.flatMap(({ plain, steered }) =>
    [plain, steered].flatMap((answer) => answer.pieces.map((piece) => valueAt(answer, piece, feature) ?? 0)),
  );
  return Math.max(0, ...values);
}
