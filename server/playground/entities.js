// Entities in a text (&amp; &#945; &rarr;) as the characters that they name; names that are not here stay as they are.

const NAMES = `amp:& lt:< gt:> quot:" apos:' copy:© reg:® trade:™ hellip:… mdash:— ndash:– lsquo:‘ rsquo:’ ldquo:“ rdquo:” bull:•
middot:· times:× divide:÷ plusmn:± minus:− deg:° micro:µ para:¶ sect:§ dagger:† euro:€ pound:£ yen:¥ cent:¢ laquo:« raquo:»
larr:← uarr:↑ rarr:→ darr:↓ harr:↔ lArr:⇐ rArr:⇒ hArr:⇔ infin:∞ ne:≠ le:≤ ge:≥ asymp:≈ equiv:≡ sum:∑ prod:∏ radic:√ int:∫ part:∂
nabla:∇ isin:∈ notin:∉ forall:∀ exist:∃ empty:∅ cap:∩ cup:∪ sub:⊂ sup:⊃ sube:⊆ supe:⊇ and:∧ or:∨ not:¬ prop:∝ ang:∠ perp:⊥ sdot:⋅
alpha:α beta:β gamma:γ delta:δ epsilon:ε zeta:ζ eta:η theta:θ iota:ι kappa:κ lambda:λ mu:μ nu:ν xi:ξ omicron:ο pi:π rho:ρ sigma:σ
tau:τ upsilon:υ phi:φ chi:χ psi:ψ omega:ω Gamma:Γ Delta:Δ Theta:Θ Lambda:Λ Xi:Ξ Pi:Π Sigma:Σ Phi:Φ Psi:Ψ Omega:Ω frac12:½
frac14:¼ frac34:¾ sup1:¹ sup2:² sup3:³ ordm:º ordf:ª szlig:ß aring:å aelig:æ oslash:ø eacute:é egrave:è agrave:à ccedil:ç ntilde:ñ
auml:ä ouml:ö uuml:ü Auml:Ä Ouml:Ö Uuml:Ü iexcl:¡ iquest:¿ spades:♠ clubs:♣ hearts:♥ diams:♦ check:✓ star:☆ prime:′ Prime:″`;

const CHARACTERS = new Map([
  ["nbsp", "\u00a0"],
  ...NAMES.split(/\s+/).map((pair) => [pair.slice(0, pair.indexOf(":")), pair.slice(pair.indexOf(":") + 1)]),
]);

const ENTITY = /&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|([A-Za-z][A-Za-z0-9]{1,10}));/g;

export function decoded(text) {
  if (!text.includes("&")) return text;
  return text.replace(ENTITY, (all, decimal, hex, name) =>
    name ? (CHARACTERS.get(name) ?? all) : character(decimal ? parseInt(decimal, 10) : parseInt(hex, 16)),
  );
}

function character(code) {
  const isOne = code > 0 && code <= 0x10ffff && !(code >= 0xd800 && code <= 0xdfff);
  return String.fromCodePoint(isOne ? code : 0xfffd);
}
