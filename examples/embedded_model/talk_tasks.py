"""Talk: greetings and names, questions about a paragraph, answers as JSON, and "I don't know" for other knowledge."""

from __future__ import annotations

import json
from collections.abc import Callable

from examples.embedded_model.sample import Dice, Turn

UNKNOWN = "I don't know."
NO_MEDIA = "I don't see or hear anything. Please attach it."
FIRST = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack", "Kate", "Leo", "Mia", "Noah",
         "Olivia", "Paul", "Rosa", "Sam", "Tom", "Vera", "Alice", "Bob", "Carol", "Dan", "Eva", "Frank", "Gina", "Hugo",
         "Julia", "Karl", "Lisa", "Max", "Nina", "Oscar", "Peter", "Ruth", "Sara", "Tina", "Victor", "Wendy", "Zoe",
         "John", "Mary", "Lucy", "Mark", "Ella", "Adam", "Laura", "Simon", "Maria")  # fmt: skip
HELD_FIRST = ("Amy", "Carl", "Diana", "Eric", "Helen", "Ivan", "Jane", "Martin", "Nora", "Robert")
TOWNS = ("Paris", "London", "Berlin", "Rome", "Madrid", "Vienna", "Oslo", "Prague", "Dublin", "Lisbon", "Athens", "Boston",
         "Chicago", "Tokyo", "Cairo", "Sydney", "Toronto", "Lima", "Geneva", "Milan")  # fmt: skip
ANIMALS = ("dog", "cat", "horse", "rabbit", "parrot", "turtle", "goat", "pony", "duck", "hamster", "cow", "sheep")
COLOURS = ("red", "green", "blue", "yellow", "black", "white", "brown", "orange", "purple", "pink", "gray")
THINGS = (
    "bike",
    "car",
    "hat",
    "coat",
    "bag",
    "house",
    "boat",
    "lamp",
    "chair",
    "scarf",
    "umbrella",
    "cup",
    "kite",
    "drum",
)
FOODS = ("apples", "pears", "bread", "soup", "cheese", "rice", "cake", "salad", "pizza", "cookies", "grapes", "plums")
JOBS = (
    "teacher",
    "doctor",
    "baker",
    "farmer",
    "pilot",
    "nurse",
    "painter",
    "writer",
    "driver",
    "cook",
    "judge",
    "singer",
)

SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello!", "Hi!", "Hello", "Hi", "Hey", "Hey!", "Hello there!", "Hi there!", "Good day!", "Hello, omniloop!"),
     "Hello! How can I help you?"),
    (("Good morning!", "Good morning"), "Good morning! How can I help you?"),
    (("Good evening!", "Good evening"), "Good evening! How can I help you?"),
    (("How are you?", "How are you doing?", "How do you do?", "How is it going?", "How's it going?", "Are you well?"),
     "I am well, thank you. How can I help you?"),
    (("Who are you?", "What are you?", "What is your name?", "Tell me who you are.", "Introduce yourself.",
      "What's your name?", "Who am I talking to?", "Which model are you?", "Do you have a name?"),
     "I am omniloop's small embedded model. I can read, see, hear and watch a little."),
    (("What can you do?", "How can you help me?", "What are you able to do?", "Help", "Help me.", "What do you know?",
      "What can I ask you?", "Can you help me?"),
     "I can name shapes and colors in pictures, movements in videos, spoken digits and words, and answer small text "
     "questions."),
    (("Thank you!", "Thanks!", "Thank you very much.", "Thanks a lot!", "Many thanks.", "Thanks", "Thank you"),
     "You are welcome!"),
    (("Bye!", "Goodbye!", "Good bye", "See you!", "See you later.", "Bye", "Good night!"), "Goodbye!"),
    (("Are you a robot?", "Are you a human?", "Are you human?", "Are you a person?", "Are you an AI?", "Are you real?"),
     "I am a small computer model."),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh."),
     "Why did the circle feel lonely? It had no sides."),
    (("How old are you?", "What is your age?"), "I am quite new."),
    (("Are you big?", "How big are you?", "How large are you?", "How many parameters do you have?"),
     "I am very small: eleven million parameters."),
    (("Can you see?", "Can you see pictures?", "Can you look at images?", "Do you understand images?"),
     "Yes, I can look at small pictures and videos."),
    (("Can you hear?", "Can you listen?", "Do you understand speech?", "Can you hear me?"),
     "Yes, I can hear digits, some words and tones."),
    (("Good job!", "Well done!", "Very good!", "Great!", "Nice!", "That is right.", "Perfect!"), "Thank you!"),
    (("That is wrong.", "Wrong!", "That's not right.", "No, that is wrong."), "I am sorry. I am only a small model."),
    (("Say hello.", "Say hi.", "Greet me."), "Hello!"),
    (("I am happy.", "I feel good.", "I am fine.", "I am well."), "I am glad to hear that."),
    (("I am sad.", "I feel bad.", "I am tired.", "I am not well."), "I am sorry to hear that."),
)  # fmt: skip

# Questions out of range, with placeholders.
OUTSIDE: tuple[str, ...] = (
    "Who won the world cup in {year}?", "Who is the president of {land}?", "What is the population of {land}?",
    "Who wrote {book}?", "What is the price of {thing}?", "What is the weather in {town}?",
    "What will happen in {year}?", "Who invented the {thing}?", "How far is it from {town} to {town2}?",
    "What is the meaning of life?", "Explain {topic}.", "Tell me about {topic}.", "How does {topic} work?",
    "Who discovered {topic}?", "When was {name} born?", "Translate {word} to French.", "What is {word} in German?",
    "Write a poem about {topic}.", "Write a program for {topic}.", "What is the news today?", "What time is it?",
    "What is the capital of {land}?", "How tall is {name}?", "Who is {name}?", "Where is {land}?",
    "What happened in {year}?", "Why is {topic} important?", "What does {word} mean?", "Who sang {book}?",
    "Give me a recipe for {food}.", "What is the best {thing}?", "Should I buy a {thing}?", "Summarize {book}.",
    "How many people live in {town}?", "Where can I buy a {thing}?", "What is the history of {land}?",
    "Do you think {name} is right?", "Which {thing} is the fastest?", "Prove {topic}.", "Recommend a {thing}.",
    "How do I cook {food}?", "What is the stock price of {book}?", "What did {name} say about {topic}?",
)  # fmt: skip
HELD_OUTSIDE = ("Who founded {town}?", "What is the currency of {land}?", "When did {topic} begin?",
                "Who painted {book}?", "What is the phone number of {name}?", "How old is {name}?",
                "How much does a {thing} cost?", "What caused {topic}?")  # fmt: skip
LANDS = ("France", "Spain", "Japan", "Brazil", "Canada", "Egypt", "India", "China", "Norway", "Mexico", "Kenya", "Peru",
         "Italy", "Germany", "Poland", "Australia", "Chile", "Turkey", "Greece", "Sweden")  # fmt: skip
TOPICS = ("gravity", "history", "music", "love", "the sun", "quantum physics", "politics", "football", "the moon", "trees",
          "electricity", "chess", "the internet", "art", "war", "evolution", "medicine", "dreams", "the ocean",
          "economics", "photosynthesis", "black holes", "the stock market", "religion", "cooking", "space travel",
          "world war two", "the weather", "dinosaurs", "volcanoes")  # fmt: skip
BOOKS = ("Hamlet", "the Bible", "Faust", "Moby Dick", "Star Wars", "Yesterday", "the Odyssey", "Harry Potter", "Apple",
         "Google", "the Iliad", "Don Quixote", "Emma", "Dracula", "Imagine")  # fmt: skip
MEDIA_QUESTIONS = ("What is in the picture?", "What do you see in the image?", "What do you hear?", "Describe the image.",
                   "What happens in the video?", "What word is spoken?", "Read the text in the picture.",
                   "Which digits do you hear?", "What color is the shape in the image?", "Describe the video.",
                   "How many shapes are in the picture?", "Transcribe the audio.")  # fmt: skip


def _name(dice: Dice) -> str:
    """A first name; in training often an invented one, so that the model copies names instead of reciting them."""
    if dice.held:
        return dice.pick(HELD_FIRST)
    return dice.pick(FIRST) if dice.chance(0.5) else dice.invented()


def _town(dice: Dice) -> str:
    return dice.pick(TOWNS) if dice.held or dice.chance(0.7) else dice.invented()


def small_talk(dice: Dice) -> list[Turn]:
    """A greeting or other small talk."""
    questions, answer = dice.pick(SMALL_TALK)
    text = dice.pick(questions)
    if dice.chance(0.15):
        text = text.lower()
    if dice.chance(0.1):
        text = text.rstrip("!?.")
    return [Turn([text], answer)]


def name_memory(dice: Dice) -> list[Turn]:
    """A question about a fact that the user gave a turn before."""
    name, town, food = _name(dice), _town(dice), dice.pick(FOODS)
    facts = {
        "name": ((f"My name is {name}.", f"I am {name}.", f"Hi, I'm {name}.", f"Call me {name}.", f"Hello, my name is {name}."),
                 f"Nice to meet you, {name}!", ("What is my name?", "Who am I?", "Do you remember my name?", "What's my name?"),
                 f"Your name is {name}."),
        "town": ((f"I live in {town}.", f"My home is in {town}.", f"I come from {town}."), f"{town} sounds nice.",
                 ("Where do I live?", "Where is my home?", "In which town do I live?"), f"You live in {town}."),
        "food": ((f"I like {food}.", f"I love {food}.", f"My favorite food is {food}."), f"I see, you like {food}.",
                 ("What do I like?", "What is my favorite food?", "What do I love?"), f"You like {food}."),
    }  # fmt: skip
    kinds = dice.some(list(facts), dice.whole(1, 2))
    turns = [Turn([dice.pick(facts[kind][0])], facts[kind][1]) for kind in kinds]
    asked = facts[dice.pick(kinds)]
    return [*turns, Turn([dice.pick(asked[2])], asked[3])]


def outside(dice: Dice) -> list[Turn]:
    """Questions about the world, which the model cannot answer."""
    if dice.chance(0.15):
        return [Turn([dice.pick(MEDIA_QUESTIONS)], NO_MEDIA)]
    town, town2 = dice.some(TOWNS, 2)
    text = dice.pick(HELD_OUTSIDE if dice.held else OUTSIDE).format(
        year=dice.whole(1500, 2090), land=dice.pick(LANDS), book=dice.pick(BOOKS), thing=dice.pick(THINGS), town=town,
        town2=town2, topic=dice.pick(TOPICS) if dice.chance(0.6) else dice.word(), name=_name(dice), word=dice.word(),
        food=dice.pick(FOODS),
    )  # fmt: skip
    return [Turn([text], UNKNOWN)]


def _person(dice: Dice, name: str) -> list[tuple[str, str, str, str]]:
    """Facts about one person: sentence, question, answer, key."""
    town, animal, colour, thing = _town(dice), dice.pick(ANIMALS), dice.pick(COLOURS), dice.pick(THINGS)
    food, job, age = dice.pick(FOODS), dice.pick(JOBS), dice.whole(5, 90)
    number = dice.whole(2, 12)
    return [
        (dice.pick((f"{name} lives in {town}.", f"{name} has a home in {town}.")), f"Where does {name} live?", f"In {town}.", "town"),
        (f"{name} is {age} years old.", f"How old is {name}?", f"{age}", "age"),
        (dice.pick((f"{name} works as a {job}.", f"{name} is a {job}.")), dice.pick((f"What is the job of {name}?", f"What does {name} work as?")), f"A {job}.", "job"),
        (f"{name} likes {food}.", dice.pick((f"What does {name} like?", f"Which food does {name} like?")), f"{food.capitalize()}.", "food"),
        (dice.pick((f"{name} has a {colour} {thing}.", f"{name} owns a {colour} {thing}.")), f"What color is the {thing} of {name}?", f"{colour.capitalize()}.", "color"),
        (dice.pick((f"{name} has {number} {animal}s.", f"{name} keeps {number} {animal}s.")).replace("sheeps", "sheep"),
         f"How many {animal}s does {name} have?".replace("sheeps", "sheep"), f"{number}", "animals"),
    ]  # fmt: skip


def paragraph(dice: Dice) -> list[Turn]:
    """A few sentences about one to three people, and one to three questions, some without an answer in the text."""
    names = list(dict.fromkeys(_name(dice) for _ in range(dice.whole(1, 3))))
    facts = [fact for name in names for fact in dice.some(_person(dice, name), dice.whole(1, 3))]
    dice.r.shuffle(facts)
    story = " ".join(fact[0] for fact in facts)
    order = dice.some(range(len(facts)), min(len(facts), dice.whole(1, 3)))
    questions = [(facts[i][1], facts[i][2]) for i in order]
    if dice.chance(0.15):
        known = {fact[1] for fact in facts}
        missing = [f for f in _person(dice, dice.pick(names)) if f[1] not in known and f[3] not in ("job", "food")]
        if missing:
            questions[-1] = (dice.pick(missing)[1], UNKNOWN)
    shape = dice.pick(("{s} {q}", "{s}\n{q}", "{q}\n{s}", "Read this: {s}\nQuestion: {q}", "Text: {s}\n{q}", "{s}\n\n{q}",
                       "Here is a story: {s} {q}", "Read the text.\n{s}\n{q}", "I tell you something. {s} And now: {q}",
                       "{s} Answer this: {q}", "Use the text to answer. {s}\n{q}", "{q} The text: {s}", "{s}\nQ: {q}"))  # fmt: skip
    if dice.held:
        shape = dice.pick(("{s}\nNow tell me: {q}", "Here is a text. {s} {q}"))
    turns = [Turn([shape.format(s=story, q=questions[0][0])], questions[0][1])]
    return turns + [Turn([q], a) for q, a in questions[1:]]


def as_json(dice: Dice) -> list[Turn]:
    """Facts of a sentence, a sum, or a list, as JSON with the requested keys."""
    roll = dice.r.random()
    if roll < 0.55:
        name, age, town, job = _name(dice), dice.whole(5, 90), _town(dice), dice.pick(JOBS)
        sentence = dice.pick((f"{name} is {age} years old and lives in {town}.", f"{name}, {age}, is a {job} in {town}.",
                              f"{name} from {town} is {age} and works as a {job}.", f"{name} lives in {town}. {name} is {age}."))  # fmt: skip
        fields = {"name": name, "age": age, "town": town}
        if job in sentence:
            fields["job"] = job
        keys = dice.some(list(fields), dice.whole(2, len(fields)))
        listed = ", ".join(keys[:-1]) + " and " + keys[-1]
        verb = dice.pick(
            ("Answer", "Respond", "Give it", "Return it", "Write it", "Say it", "Put it", "Show it", "Print it")
        )
        how = dice.pick(
            ("as JSON", "in JSON", "as a JSON object", "in JSON format", "using JSON", "in the form of JSON")
        )
        that = dice.pick(
            (
                "with the keys {k}",
                "with {k}",
                "using the keys {k}",
                "with keys {k}",
                "giving {k}",
                "containing {k}",
                "(keys: {k})",
            )
        )
        shapes = (f"{{s}} {verb} {how} {that}.", f"{verb} {how} {that}: {{s}}", f"{{s}}\n{verb} {how} {that}.", f"{how} {that}: {{s}}",
                  "{s} Answer as JSON with the keys {k}.", "Extract {k} as JSON: {s}", "{s} Give me {k} as JSON.", "{s} I need JSON {t}.",
                  "Write {k} as a JSON object: {s}", "{s}\nReturn JSON with {k}.", "JSON with {k}, please: {s}", "Make JSON {t}: {s}",
                  "Turn this sentence into JSON {t}: {s}", "Convert to JSON {t}: {s}", "{s} What is the JSON for {k}?", "{k} as JSON: {s}")  # fmt: skip
        shapes = tuple(shape.replace("{t}", that) for shape in shapes)
        if dice.held:
            shapes = ("{s} Please reply with JSON that has {k}.", "Turn this into JSON with the keys {k}: {s}")
        return [
            Turn([dice.pick(shapes).format(s=sentence, k=listed)], json.dumps({k: fields[k] for k in keys}), "json")
        ]
    if roll < 0.8:
        a, b = dice.whole(0, 99), dice.whole(0, 99)
        shapes = ("What is {a} + {b}? Answer as JSON.", "{a} + {b}, as JSON with the key result.", "Answer in JSON: {a} + {b}",
                  'Calculate {a} + {b} and answer in JSON with the key "result".', "Give {a} + {b} as JSON.", "{a} + {b} in JSON",
                  "Compute {a} + {b}. Respond in JSON.", "What is {a} plus {b}? Use JSON.", "The sum of {a} and {b} as JSON, please.",
                  "How much is {a} + {b}? Answer with JSON.", "Return JSON with the result of {a} + {b}.", "JSON: {a} + {b}")  # fmt: skip
        if dice.held:
            shapes = ("Add {a} and {b} and reply in JSON.", "How much is {a} + {b}? Reply as JSON.")
        return [Turn([dice.pick(shapes).format(a=a, b=b)], json.dumps({"result": a + b}), "json")]
    items = [dice.word() for _ in range(dice.whole(2, 4))]
    shapes = ("Write this list as JSON: {w}", "Give me a JSON list of {w}", "As a JSON array: {w}", "Make a JSON list: {w}",
              "Convert this list to JSON: {w}", "A JSON array of {w}", "List as JSON: {w}", "Write a JSON array with {w}",
              "These items as JSON: {w}", "Make JSON from this list: {w}", "JSON list: {w}", "Return these as a JSON list: {w}")  # fmt: skip
    if dice.held:
        shapes = ("Turn this list into JSON: {w}", "Put these in a JSON array: {w}")
    return [Turn([dice.pick(shapes).format(w=", ".join(items))], json.dumps(items), "json")]


TASKS: tuple[tuple[Callable[[Dice], list[Turn]], float, str], ...] = (
    (small_talk, 1.0, "text_talk"),
    (name_memory, 1.0, "text_talk"),
    (outside, 1.2, "text_unknown"),
    (paragraph, 2.5, "text_paragraph"),
    (as_json, 2.0, "json"),
)
