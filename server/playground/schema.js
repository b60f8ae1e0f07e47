// JSON schemas in words: a table of fields, and a type as text with links to other types.

import { h } from "./dom.js";

export const nameOf = (schema) => schema.$ref.split("/").at(-1);

/** A type: a name that leads to its own part, or words. */
export function typeOf(schema) {
  if (schema.$ref) return h("a", { href: `#${nameOf(schema)}` }, nameOf(schema));
  if (schema.anyOf) return joined(schema.anyOf.map(typeOf), " or ");
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" or ");
  if (schema.type === "array") return schema.items ? h("span", {}, "list of ", typeOf(schema.items)) : "list";
  if (schema.type === "object" && schema.additionalProperties?.type)
    return `object of ${schema.additionalProperties.type}s`;
  return schema.type ?? "anything";
}

function joined(parts, between) {
  return h(
    "span",
    {},
    parts.flatMap((part, at) => (at ? [between, part] : [part])),
  );
}

/** The fields of an object, each with its type and its sentence. */
export function fieldsOf(schema) {
  const required = schema.required ?? [];
  const isOptional = ([name]) => !required.includes(name);
  const fields = Object.entries(schema.properties ?? {}).sort((one, other) => isOptional(one) - isOptional(other));
  const rows = fields.map(([name, field]) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, h("code", {}, name), required.includes(name) && h("small", {}, "required")),
      h("td", {}, typeOf(field)),
      h("td", {}, field.description ?? "", exampleOf(field)),
    ),
  );
  if (!rows.length) return h("p", {}, "No fields of its own: ", typeOf(schema));
  return h(
    "div",
    { class: "wide", tabindex: 0, role: "region", "aria-label": "Fields" },
    h("table", {}, h("tbody", {}, rows)),
  );
}

function exampleOf({ examples }) {
  return examples && h("small", {}, "for example ", h("code", {}, JSON.stringify(examples[0])));
}
