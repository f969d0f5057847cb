// A request as code to copy: Python for the OpenAI SDK, or curl. The key is named, never written out.

const SDK = ["model", "messages", "max_tokens", "temperature"]; // what the SDK takes by itself

export function curl(body, url) {
  const text = JSON.stringify(body, null, 1).replaceAll("'", "'\\''");
  return [
    `curl -s '${url}/chat/completions' \\`,
    "  -H \"Authorization: Bearer $SAESTEER_API_KEY\" -H 'Content-Type: application/json' \\",
    `  -d '${text}'`,
    "",
  ].join("\n");
}

export function python(body, url) {
  const entries = Object.entries(body);
  const fields = entries
    .filter(([name]) => SDK.includes(name))
    .map(([name, value]) => `    ${name}=${literal(value, 4)},`);
  const others = Object.fromEntries(entries.filter(([name]) => !SDK.includes(name)));
  return [
    "import os",
    "",
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(url)}, api_key=os.environ.get("SAESTEER_API_KEY") or "none")`,
    "answer = client.chat.completions.create(",
    ...fields,
    `    extra_body=${literal(others, 4)},`,
    ")",
    "print(answer.choices[0].message.content)",
    "print(answer.saesteer)",
    "",
  ].join("\n");
}

// A JSON value as Python writes it, on one line where it is short. A JSON string is one in Python as well.
function literal(value, indent) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inside = indent + 4;
  const list = Array.isArray(value);
  const parts = list
    ? value.map((one) => literal(one, inside))
    : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, inside)}`);
  const [open, close] = list ? "[]" : "{}";
  const line = `${open}${parts.join(", ")}${close}`;
  if (line.length < 100 && !line.includes("\n")) return line;
  return `${open}\n${parts.map((part) => `${" ".repeat(inside)}${part},\n`).join("")}${" ".repeat(indent)}${close}`;
}
