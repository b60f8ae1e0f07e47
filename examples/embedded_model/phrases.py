"""How questions are put: for each kind, the phrasings of training and those kept for the held-out set."""

LEADS = (
    "Please answer:", "Question:", "Hello!", "Hi.", "Hey,", "Tell me:", "Quick question:", "Please:", "OK,",
    "One question:", "Good morning!", "So,", "Now,", "Look:", "I wonder:", "Help me:", "I have a question:", "Excuse me,",
    "Here is my question.", "Could you answer this?", "Well,", "And now:", "Listen:", "Let us see.", "Try this:", "Next:",
    "My question is:", "Good evening.", "Dear assistant,", "Task:", "Q:", "Answer this:", "Think:", "Be careful.",
)  # fmt: skip
ASIDES = ("Thanks!", "Please.", "Thank you.", "Answer briefly.", "Be brief.", "Just the answer.", "Keep it short.")
SYSTEMS = (
    "You are a helpful assistant.", "You are a small model that sees, hears and reads.", "Answer briefly.",
    "You are omniloop, a small assistant.", "Be short and precise.", "You are a friendly assistant.",
    "Answer the question of the user.", "You help people.",
)  # fmt: skip

# words of a training phrasing that may stand for each other
_PICTURE, _PICTURES = ("image", "picture", "photo", "drawing"), ("images", "pictures", "photos")
_FILM, _SOUND = ("video", "clip", "film", "movie"), ("recording", "audio", "sound", "sound clip", "audio clip")
SWAPS: dict[str, tuple[str, ...]] = {
    "picture": _PICTURE, "image": _PICTURE, "photo": _PICTURE, "pictures": _PICTURES, "images": _PICTURES, "video": _FILM,
    "clip": _FILM, "recording": _SOUND, "audio": _SOUND, "digits": ("digits", "numbers"), "spoken": ("spoken", "said", "heard"),
    "said": ("said", "spoken", "heard"), "see": ("see", "notice", "find", "spot", "recognize"), "Which": ("Which", "What"),
    "shown": ("shown", "visible", "drawn", "displayed", "seen", "to be seen"), "color": ("color", "colour"),
    "colour": ("color", "colour"), "Write": ("Write", "Give me", "Show me", "Print", "Put"), "object": ("object", "thing", "item"),
    "Convert": ("Convert", "Change", "Turn", "Transform"), "Calculate": ("Calculate", "Compute", "Work out", "Find"),
    "Compute": ("Calculate", "Compute", "Work out", "Evaluate"), "Tell": ("Tell", "Show", "Give"), "Name": ("Name", "Say", "State"),
    "Describe": ("Describe", "Explain", "Tell me about", "Summarize"), "bigger": ("bigger", "larger"),
    "smaller": ("smaller", "littler"), "word": ("word", "term"), "written": ("written", "printed", "shown"), "moving": ("moving", "going"),
    "printed": ("printed", "written"), "Sort": ("Sort", "Order", "Arrange"), "Reverse": ("Reverse", "Invert", "Flip"),
    "text": ("text", "writing", "print"), "appears": ("appears", "shows up", "comes up"), "becomes": ("becomes", "turns"),
    "beeps": ("beeps", "tones", "sounds"), "long": ("long",), "list": ("list", "sequence"), "contain": ("contain", "include", "have"),
    "contains": ("contains", "includes", "has"), "shows": ("shows", "has", "presents"), "has": ("has", "shows"),
    "voice": ("voice", "speaker", "person"), "speaker": ("voice", "speaker", "person"), "hear": ("hear", "notice"),
}  # fmt: skip
COMMAND_VERBS = frozenset(
    "Name Describe Count Write Sort Reverse Spell Convert Tell Read Transcribe Add Subtract Multiply Divide Calculate Compute "
    "Solve Put Make Turn Repeat Say Copy Order Arrange Find Change Express List Type Uppercase Lowercase Take".split()
)
WISHES = ("Can you {c}?", "Could you {c}?", "Could you please {c}?", "Please {c}.", "I want you to {c}.", "Now {c}.",
          "Would you {c}?", "I would like you to {c}.", "Try to {c}.", "{c}")  # fmt: skip

# name: (training, held out)
PHRASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # pictures: one object
    "describe": (
        ("Say what you see.", "What can one see in the picture?", "Tell me what you see.", "Which object is in the picture?", "What is drawn here?", "Give a description.", "What appears in the image?", "What have we here?",
         "What is in the picture?", "What is in this image?", "Describe the picture.", "Describe this image.",
         "What do you see?", "What does the image show?", "What is shown here?", "What can you see in this picture?",
         "Tell me what is in the picture.", "What's in this image?", "Describe what you see.", "What is this?",
         "Please describe the image.", "What is in the photo?", "What does this picture show?", "What is here?"),
        ("What is visible in the image?", "What can be seen here?", "Say what the picture shows.",
         "What's in the picture?"),
    ),
    "shape": (
        ("Which shape can be seen?", "The shape?", "What form does it have?", "Which form is it?", "What shape does the object have?", "What shape is the object?",
         "What shape is this?", "What shape is in the picture?", "Which shape do you see?", "Name the shape.",
         "What is the shape?", "Which shape is shown?", "What shape do you see in the image?",
         "Tell me the shape.", "What shape is it?", "What kind of shape is in the image?"),
        ("Which shape is in the image?", "What shape can you see?"),
    ),
    "colour": (
        ("What color does it have?", "The color?", "In what color is the shape drawn?", "Which color do you see?", "What color does the object have?", "What is the color of it?", "Which color has the object?",
         "What color is it?", "What colour is it?", "What color is the shape?", "What colour is the shape?",
         "Which color does the shape have?", "Name the color of the shape.", "What is the color of the object?",
         "What color is the object?", "What colour is the object in the picture?", "Tell me the color.",
         "What is its color?", "Which color is the shape?"),
        ("Which colour does the object have?", "What is the color of the shape?"),
    ),
    "background": (
        ("Which color does the background have?", "What color is the area around the shapes?", "The background is which color?", "What color is used for the background?", "The background color?",
         "What color is the background?", "What colour is the background?", "Which color is the background?",
         "What is the background color?", "Name the color of the background.", "What color is behind the shapes?",
         "Tell me the background color.", "On what color is it drawn?", "What is the color of the background?"),
        ("What is the colour of the background?", "Which colour does the background have?"),
    ),
    # pictures: many objects
    "count": (
        ("How many {what} can be seen?", "Can you count the {what}?", "How many {what} does it show?", "In this picture, how many {what} are there?", "How many {what} are there in the image?", "What is the count of {what}?", "How many {what} are visible?", "How many {what} have been drawn?", "There are how many {what}?",
         "How many {what} are there?", "How many {what} do you see?", "Count the {what}.",
         "How many {what} are in the picture?", "What is the number of {what}?", "How many {what} are shown?",
         "Tell me how many {what} there are.", "How many {what} can you see?", "Number of {what}?",
         "How many {what} does the image show?", "Please count the {what}.", "How many {what}?"),
        ("How many {what} are in this image?", "How many {what} can you count?"),
    ),
    "exists": (
        ("Is a {what} shown?", "Are you able to see a {what}?", "Does it show a {what}?", "Is there any {what} in the picture?", "Does this image have a {what}?", "Can a {what} be seen?", "Yes or no: is there a {what}?",
         "Is there a {what}?", "Is there a {what} in the picture?", "Do you see a {what}?", "Can you see a {what}?",
         "Does the picture show a {what}?", "Does the image contain a {what}?", "Is a {what} in the image?"),
        ("Is there a {what} in this image?", "Does the image show a {what}?"),
    ),
    "colour_of": (
        ("What is the {what}'s color?", "In what color is the {what}?", "What color has the {what}?", "The color of the {what}?", "Which color is the {what} drawn in?", "The {what} is what color?",
         "What color is the {what}?", "What colour is the {what}?", "Which color does the {what} have?",
         "What is the color of the {what}?", "Name the color of the {what}.", "Tell me the color of the {what}.",
         "The {what} has which color?"),
        ("Which colour is the {what}?", "What is the colour of the {what}?"),
    ),
    "shape_of": (
        ("What shape does the {what} one have?", "The {what} one is what shape?", "What is {what}?", "Which one is {what}?", "What shape has the {what} thing?", "What {what} thing is there?",
         "What shape is {what}?", "Which shape is {what}?", "What is the {what} shape?", "Name the {what} shape.",
         "What shape is the {what} object?", "Which object is {what}?", "What kind of shape is {what}?"),
        ("Which shape is the {what} one?", "What is the shape of the {what} object?"),
    ),
    "relation": (
        ("Is it correct that the {a} is {rel} the {b}?", "Is it so that the {a} is {rel} the {b}?", "Would it be right to say the {a} is {rel} the {b}?",
         "In the picture, is the {a} {rel} the {b}?", "Can you see the {a} {rel} the {b}?", "Does the {a} lie {rel} the {b}?", "Is it true that the {a} is {rel} the {b}?", "The {a} is {rel} the {b}, yes or no?", "Here, is the {a} {rel} the {b}?", "Does the image show the {a} {rel} the {b}?", "Is the {a} placed {rel} the {b}?",
         "Is the {a} {rel} the {b}?", "Is the {a} {rel} the {b} in the picture?", "Would you say the {a} is {rel} the {b}?",
         "Do you see the {a} {rel} the {b}?", "Look at the picture: is the {a} {rel} the {b}?",
         "True or not: the {a} is {rel} the {b}. Answer yes or no.", "Yes or no: is the {a} {rel} the {b}?"),
        ("In this image, is the {a} {rel} the {b}?", "Is it right that the {a} is {rel} the {b}?"),
    ),
    "sided": (
        ("Is the {a} {sides} the {b}?", "The {a} is {sides} the {b}?", "Tell me, is the {a} {sides} the {b}?",
         "Do you see the {a} {sides} the {b}?", "In the picture, is the {a} {sides} the {b}?",
         "Say whether the {a} is {sides} the {b}.", "{a}: {sides} the {b}?"),
        ("Does the {a} stand {sides} the {b}?", "Here, is the {a} {sides} the {b}?"),
    ),
    "where": (
        ("Where do you find the {a}, seen from the {b}?", "With respect to the {b}, where is the {a}?",
         "Seen from the {b}, where is the {a}?", "Compared to the {b}, where is the {a}?", "Where is the {a} if you look from the {b}?", "What is the position of the {a} relative to the {b}?", "Where does the {a} lie relative to the {b}?", "From the {b}, where is the {a}?", "In relation to the {b}, where is the {a}?", "Where can you find the {a} relative to the {b}?",
         "Where is the {a}, seen from the {b}: left, right, above or below?", "Where is the {a} relative to the {b}?",
         "Is the {a} left, right, above or below the {b}?", "On which side of the {b} is the {a}?",
         "Where is the {a} compared to the {b}?", "In which direction from the {b} is the {a}?"),
        ("Where do you see the {a} relative to the {b}?", "Relative to the {b}, where is the {a}?"),
    ),
    "extreme": (
        ("What is the object {side}?", "What is drawn {side}?", "Which one of the shapes is {side}?", "What thing is {side}?", "{side}: what is there?", "What lies {side}?",
         "Which object is {side}?", "Which shape is {side}?", "What is {side}?", "Name the shape {side}.",
         "Which one is {side}?", "What do you see {side}?", "Tell me which object is {side}."),
        ("What object is {side}?", "Which of the shapes is {side}?"),
    ),
    "bigger": (
        ("Between the {a} and the {b}, which is {size}?", "Which of the two is {size}, the {a} or the {b}?", "Tell me which is {size}: the {a} or the {b}.", "Is it the {a} or the {b} that is {size}?", "Compare the {a} and the {b}: which is {size}?",
         "Which is {size}, the {a} or the {b}?", "Which one is {size}: the {a} or the {b}?",
         "What is {size}, the {a} or the {b}?", "Is the {a} or the {b} {size}?",
         "Which shape is {size}, the {a} or the {b}?", "Of the {a} and the {b}, which is {size}?"),
        ("Which object is {size}, the {a} or the {b}?", "The {a} or the {b}: which is {size}?"),
    ),
    # several pictures
    "which_picture": (
        ("Which one shows a {what}?", "In which one do you see a {what}?", "A {what} is in which picture?", "Which picture includes a {what}?", "Which of them shows a {what}?", "Which of these images contains a {what}?", "In which image can you see a {what}?", "Tell me which picture shows a {what}.", "Which photo has the {what}?",
         "Which picture shows a {what}?", "Which of the pictures shows a {what}?", "In which picture is a {what}?",
         "Which image has a {what}?", "Which of the images shows a {what}?", "Where is the {what}, in which picture?",
         "Which picture contains a {what}?", "Find the picture with a {what}."),
        ("Which image contains a {what}?", "In which of the pictures do you see a {what}?"),
    ),
    "more_objects": (
        ("Which of them has {more} shapes?", "Which one shows {more} objects?", "Which image contains {more} shapes?", "Where are {more} shapes, in the first or the second picture?", "Tell me which picture has {more} objects.", "Which picture contains {more} objects?",
         "Which picture has {more} shapes?", "Which of the two pictures has {more} shapes?",
         "Which image shows {more} objects?", "Which of the two images has {more} objects?",
         "In which picture are there {more} shapes?", "Which one has {more} shapes?"),
        ("Which of the two pictures shows {more} shapes?", "Which image has {more} objects?"),
    ),
    "same": (
        ("Is it the same {what} in the two pictures?", "Does the second picture have the same {what} as the first?", "Are both {what}s equal?", "Do they have the same {what}?", "Do these images share the {what}?", "Is the {what} in both images the same?",
         "Do both pictures show the same {what}?", "Is the {what} the same in both pictures?",
         "Do the two images have the same {what}?", "Are the two {what}s the same?", "Same {what} in both pictures?",
         "Compare the two pictures: is the {what} the same?"),
        ("Do the two pictures show the same {what}?", "Is it the same {what} in both images?"),
    ),
    "nth_picture": (
        ("What is shown in the {nth} picture?", "What can you see in the {nth} image?", "And the {nth} picture?", "Tell me what the {nth} picture shows.", "What is in the {nth} one?",
         "What is in the {nth} picture?", "What does the {nth} picture show?", "Describe the {nth} picture.",
         "What is in the {nth} image?", "What do you see in the {nth} image?", "Describe the {nth} image."),
        ("What does the {nth} image show?", "What do you see in the {nth} picture?"),
    ),
    # print
    "read": (
        ("What letters are in the picture?", "What can you read?", "Tell me what is written.", "What is the printed word?", "Which text is shown?", "What word is written?", "What is the word?", "Which word is it?", "What does the image say?", "Copy the text from the picture.", "Say what is written here.", "What stands there?",
         "What does it say?", "What is written here?", "Read the text.", "What word is this?", "Read the word.",
         "What does the sign say?", "What is the text in the picture?", "What text is in the image?",
         "Which word do you see?", "What is printed in the picture?", "Please read this.", "What is written?",
         "Read what is in the image.", "What does the picture say?", "Read this."),
        ("What is the word in the picture?", "What is written in the image?", "What does the text say?"),
    ),
    "read_number": (
        ("What is the number in the picture?", "Which digits are in the picture?", "Which number is written?", "What digits are shown?", "What can you read?", "Read the digits.", "What number does the picture show?", "What does the image say?", "Which number is it?",
         "What number is this?", "Read the number.", "Which number do you see?", "What is the number?",
         "What number is written here?", "What number is in the picture?", "What number is printed here?",
         "Tell me the number.", "What does it say?", "Read this.", "What is written here?"),
        ("Which number is in the picture?", "What is the number in the image?"),
    ),
    # sound
    "hear": (
        ("What can you hear in the sound?", "What is heard?", "Say what you hear.", "Which sound is this?", "What does it sound like?", "Tell me what you hear.", "What kind of sound is this?", "What can one hear?", "What is there to hear?", "Listen and describe.", "What could this sound be?", "What do you hear here?", "Which sounds can you hear?", "What did you hear?",
         "What do you hear?", "What is in the recording?", "What is this sound?", "Describe the sound.",
         "What can you hear?", "Listen. What is it?", "What is in the audio?", "Describe the audio.",
         "What does the recording contain?", "What sound is this?"),
        ("What can be heard?", "What do you hear in the recording?"),
    ),
    "digits": (
        ("Say which digits you hear.", "Which digits can you hear?", "Which digits does the person say?", "What number do you hear?", "Note the digits.", "What is the spoken number?", "Which number is read?", "Please note down the digits.", "Write out the digits you hear.", "What is being said?", "Which digits are in the recording?", "What was said?", "The digits, please.",
         "Which digits do you hear?", "What digits are spoken?", "Write down the digits.", "What number is spoken?",
         "Which numbers do you hear?", "Write the digits that you hear.", "Transcribe the digits.",
         "What digits does the voice say?", "Which digits are said?", "What are the digits?",
         "Type the spoken digits.", "What numbers are read out?", "Transcribe the recording.",
         "Transcribe this.", "What is said?", "What does the speaker say?"),
        ("Which digits are spoken?", "What digits do you hear?", "Write down the spoken digits."),
    ),
    "num_digits": (
        ("How many digits do you hear?", "How many digits are spoken?", "Count the spoken digits.",
         "How many numbers does the voice say?"),
        ("How many digits are said?",),
    ),
    "last_digit": (
        ("What is the {nth} digit?", "Which digit is spoken {nth}?", "Tell me the {nth} digit.",
         "What is the {nth} digit that you hear?"),
        ("Which one is the {nth} digit?",),
    ),
    "command": (
        ("Say the word.", "Which word can you hear?", "Which word does the person say?", "What was said?", "What is being said?", "Note the spoken word.", "What is the word?", "Which command was given?", "Tell me the word.", "Which word is in the recording?", "What word was that?", "The word, please.",
         "Which word do you hear?", "What word is spoken?", "What is the spoken word?", "What command is this?",
         "Which word is said?", "Write the word that you hear.", "What does the voice say?", "Transcribe the word.",
         "Which command do you hear?", "What is said?", "Transcribe the recording.", "Transcribe this.",
         "What word does the speaker say?", "What does the speaker say?", "What is the command?"),
        ("What word do you hear?", "Which word is spoken?", "Which command is spoken?"),
    ),
    "tone": (
        ("Does this sound rise or fall?", "Is it rising or falling?", "Is the sound going up or down?", "Is the tone going up or down?", "Does it get higher or lower?", "Tell me if the tone is rising or falling.", "Is the pitch going up or down?", "Do you hear a rising or a falling tone?",
         "Is the tone rising or falling?", "Does the tone rise or fall?", "Does the pitch go up or down?",
         "Is the pitch rising or falling?", "Which way does the tone go, rising or falling?",
         "Is the sound rising or falling?", "Rising or falling?"),
        ("Is this tone rising or falling?", "Would you call the tone rising or falling?"),
    ),
    "beeps": (
        ("How many beeps can be heard?", "How often does it beep?", "How many beeps does the recording have?", "How many signals do you hear?", "How many beeps were there?", "Count how many beeps you hear.", "In the audio, how many beeps are there?",
         "How many beeps do you hear?", "Count the beeps.", "How many beeps are there?", "What is the number of beeps?",
         "How many tones do you hear?", "How many times does it beep?", "Number of beeps?",
         "How many beeps are in the recording?"),
        ("How many beeps can you hear?", "How many beeps are in the audio?"),
    ),
    "length": (
        ("Is the beep long or short?", "Do the beeps sound long or short?", "Is this a long or a short beep?", "Do you hear a long or a short beep?", "Tell me if the beeps are long or short.", "Are they long or short?", "Short or long?", "How long are the beeps, long or short?", "Is each beep short or long?",
         "Are the beeps long or short?", "Is it a long or a short beep?", "Are the tones long or short?",
         "Is the sound long or short?", "Long or short beeps?", "Would you call the beeps long or short?"),
        ("Do you hear long or short beeps?", "Are these beeps long or short?"),
    ),
    # film
    "describe_film": (
        ("What takes place in the video?", "What can you see in the clip?", "What goes on here?", "Say what happens in the video.", "What is to be seen in the clip?", "What do we see in the clip?", "What occurs?", "Tell me about the clip.", "What do you see?",
         "What happens in the video?", "Describe the video.", "What do you see in the video?", "What happens?",
         "Describe the clip.", "What is going on in the video?", "What happens in this clip?",
         "Tell me what happens in the video.", "What does the video show?", "What is in the video?"),
        ("What happens in this video?", "Describe what happens.", "What does the clip show?"),
    ),
    "direction": (
        ("What is the direction of the {what}?", "Which direction does the {what} go?", "To which side does the {what} move?", "What way is the {what} going?", "Where does the {what} move to?", "The {what} is moving which way?", "Into which direction is the {what} moving?", "How does the {what} move: left, right, up or down?", "Tell me the direction of the {what}.",
         "Which way does the {what} move?", "In which direction does the {what} move?", "Where does the {what} go?",
         "In what direction is the {what} moving?", "Does the {what} move left, right, up or down?",
         "Which direction is the {what} going?", "Where is the {what} moving?", "The {what} moves in which direction?"),
        ("What direction does the {what} move in?", "Which way is the {what} moving?"),
    ),
    "moves": (
        ("Which thing moves?", "Which one moves?", "Which one is moving?", "What object is moving?", "Which of them is moving?", "What is the moving object?", "Which of these shapes moves?", "Who moves?",
         "What moves?", "What is moving?", "Which object moves?", "Which shape is moving?", "What moves in the video?",
         "Which object is moving in the video?", "Which shape moves?", "Name the moving object."),
        ("Which of the objects moves?", "What is moving in the video?"),
    ),
    "changes": (
        ("Which one changes color?", "Which of them changes its color?", "What gets a new color?", "Which thing gets another color?", "What turns into another color?", "Which object gets a different color?",
         "What changes color?", "Which object changes its color?", "What changes colour?", "Which shape changes color?",
         "What is it that changes color?", "Which object changes colour in the video?"),
        ("Which of the shapes changes color?", "Which object changes color?"),
    ),
    "turns": (
        ("What is the new color of the {what}?", "Which color does the {what} get?", "The {what} turns to what color?", "What color is the {what} in the end?", "Which color does the {what} have afterwards?", "To which color does the {what} change?",
         "What color does the {what} turn?", "Which color does the {what} become?", "What colour does the {what} turn to?",
         "What is the color of the {what} at the end?", "Into which color does the {what} change?"),
        ("What colour does the {what} become?",),
    ),
    "first": (
        ("What can be seen first?", "Which one comes first?", "What is seen first?", "Which of the two appears first?", "Which thing is there first?", "What do you see first?", "Name the object that appears first.", "Which one is the first to appear?", "What object came first?",
         "What appears first?", "Which object appears first?", "Which shape appears first?", "What comes first?",
         "Which one appears first?", "What is the first shape to appear?", "What shows up first?"),
        ("Which of the shapes appears first?", "What is the first object to appear?"),
    ),
    # text
    "sum": (
        ("What does {a} plus {b} make?", "{a} and {b} make what?", "Give me the sum of {a} and {b}.", "What is {a} and {b} together?", "{a} plus {b}", "{a} plus {b}?", "What is the result of {a} + {b}?", "Tell me {a} + {b}.", "What is the total of {a} and {b}?", "Do you know what {a} + {b} is?",
         "What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} = ?", "What is {a} plus {b}?", "Add {a} and {b}.",
         "Calculate {a} + {b}.", "How much is {a} + {b}?", "How much is {a} plus {b}?", "Compute {a} + {b}.",
         "What is the sum of {a} and {b}?", "{a}+{b}=", "What do you get when you add {a} and {b}?", "Solve {a} + {b}."),
        ("What's {a} + {b}?", "Please add {a} and {b}.", "What does {a} + {b} make?"),
    ),
    "difference": (
        ("What does {a} minus {b} make?", "{a} minus {b}", "{a} minus {b}?", "What is left of {a} after taking {b}?", "Give me {a} minus {b}.", "What is the result of {a} - {b}?", "What is the difference of {a} and {b}?", "Tell me {a} - {b}.", "Do you know what {a} - {b} is?",
         "What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} = ?", "What is {a} minus {b}?",
         "Subtract {b} from {a}.", "Calculate {a} - {b}.", "How much is {a} - {b}?", "How much is {a} minus {b}?",
         "Compute {a} - {b}.", "{a}-{b}=", "Take {b} away from {a}.", "Solve {a} - {b}."),
        ("What's {a} - {b}?", "Please subtract {b} from {a}.", "What does {a} - {b} make?"),
    ),
    "product": (
        ("What does {a} x {b} make?", "{a} times {b}", "{a} times {b}?", "Give me {a} times {b}.", "What is the result of {a} * {b}?", "How much is {a} * {b}?", "Tell me {a} times {b}.", "Do you know what {a} * {b} is?", "Compute {a} multiplied by {b}.", "What is {a} multiplied by {b}?",
         "What is {a} * {b}?", "{a} * {b}", "{a}*{b}", "{a} x {b}", "What is {a} times {b}?", "Multiply {a} by {b}.",
         "Calculate {a} * {b}.", "How much is {a} times {b}?", "Compute {a} x {b}.", "{a} * {b} = ?",
         "What is the product of {a} and {b}?", "What is {a} x {b}?"),
        ("What's {a} * {b}?", "Please multiply {a} by {b}.", "What does {a} times {b} make?"),
    ),
    "quotient": (
        ("What does {a} divided by {b} make?", "{a} divided by {b}", "{a} over {b}", "What is the result of {a} / {b}?", "How much is {a} / {b}?", "{a} divided by {b}?", "Tell me {a} / {b}.", "How often does {b} fit into {a}?", "Compute {a} divided by {b}.", "Give me {a} divided by {b}.",
         "What is {a} / {b}?", "{a} / {b}", "{a}/{b}", "What is {a} divided by {b}?", "Divide {a} by {b}.",
         "Calculate {a} / {b}.", "How much is {a} divided by {b}?", "{a} / {b} = ?", "Compute {a} / {b}."),
        ("What's {a} / {b}?", "Please divide {a} by {b}."),
    ),
    "larger": (
        ("Which of the two is larger, {a} or {b}?", "Tell me the larger of {a} and {b}.", "The larger one: {a} or {b}?", "Which one is bigger, {a} or {b}?", "{a} or {b}: which is larger?",
         "Which is larger, {a} or {b}?", "Which number is bigger: {a} or {b}?", "What is larger, {a} or {b}?",
         "Is {a} or {b} the larger number?", "Which is greater, {a} or {b}?"),
        ("Which one is larger: {a} or {b}?",),
    ),
    "count_up": (
        ("Say the numbers from {a} to {b}.", "What are the numbers from {a} to {b}?", "All numbers from {a} to {b}, please.", "Count for me from {a} to {b}.", "Start at {a} and count to {b}.", "I want the numbers from {a} to {b}.", "Numbers from {a} to {b}.",
         "Count from {a} to {b}.", "Please count from {a} to {b}.", "Count up from {a} to {b}.",
         "List the numbers from {a} to {b}.", "Write the numbers from {a} to {b}.", "Can you count from {a} to {b}?"),
        ("Give me the numbers from {a} to {b}.", "Could you count from {a} to {b}?"),
    ),
    "count_down": (
        ("Count in reverse from {a} to {b}.", "Count backward from {a} to {b}.", "Go down from {a} to {b}.", "List the numbers from {a} down to {b}.", "Start at {a} and count down to {b}.", "Numbers from {a} down to {b}.", "Count from {a} to {b}.", "Count from {a} back to {b}.",
         "Count down from {a} to {b}.", "Count backwards from {a} to {b}.", "Please count down from {a} to {b}.",
         "Can you count backwards from {a} to {b}?"),
        ("Count back from {a} to {b}.",),
    ),
    "letters": (
        ("What is the number of letters in {w}?", "Tell me how many letters {w} has.", "The word {w} has how many letters?", "How many characters does {w} have?", "How many letters are there in {w}?", "How many letters does the term {w} contain?",
         "How many letters are in the word {w}?", "How many letters does the word {w} have?", "How many letters has {w}?",
         "Count the letters of {w}.", "How many letters are in {w}?", "How long is the word {w}?"),
        ("How many letters does {w} have?",),
    ),
    "num_words": (
        ("Count the words in: {w}", "How many words are there: {w}", "Tell me how many words this has: {w}", "How many words does this text have: {w}", "How many words are here: {w}",
         "How many words are in this sentence: {w}", "Count the words: {w}", "How many words: {w}",
         "How many words does this sentence have? {w}"),
        ("How many words are in the sentence: {w}",),
    ),
    "reverse": (
        ("Give {w} backwards.", "Say {w} backwards.", "How do you write {w} backwards?", "Can you reverse {w}?", "I want {w} backwards.", "Flip the word {w}.", "What is the reverse of {w}?", "How does {w} look in reverse?", "Write the letters of {w} in reverse order.", "Put {w} in reverse.", "Show {w} in reverse.", "Backwards: {w}",
         "Reverse the word {w}.", "Write {w} backwards.", "Spell {w} backwards.", "Reverse {w}.", "Turn {w} around.",
         "What is {w} backwards?", "What is {w} spelled backwards?", "Please reverse the word {w}.",
         "Write the word {w} in reverse."),
        ("Can you write {w} backwards?", "Give me {w} in reverse."),
    ),
    "reverse_list": (
        ("Backwards, please: {w}", "Please give me this list in reverse: {w}",
         "Reverse the order of this list: {w}", "Give me this list backwards: {w}", "In reverse order: {w}", "Reverse: {w}", "Reverse these items: {w}", "What is the reverse of this list: {w}", "Start from the end: {w}",
         "Reverse this list: {w}", "Reverse the list {w}", "Put this list in reverse order: {w}",
         "Write this list backwards: {w}", "Turn the list around: {w}"),
        ("Please reverse the following list: {w}",),
    ),
    "upper": (
        ("Give me {w} in capital letters.", "Show {w} in uppercase.", "How does {w} look in upper case?", "In capitals: {w}", "Uppercase {w}.", "Write {w} in all caps.", "To upper case: {w}", "All caps: {w}", "I want {w} in capital letters.", "Spell {w} with capital letters only.",
         "Write {w} in upper case.", "Write {w} in capital letters.", "Put {w} in uppercase.", "Make {w} uppercase.",
         "Convert {w} to upper case.", "What is {w} in capitals?", "Uppercase: {w}", "Capitalize every letter of {w}.",
         "Turn {w} into capital letters."),
        ("Please write {w} in capitals.", "Change {w} to upper case."),
    ),
    "lower": (
        ("Give me {w} in small letters.", "Show {w} in lowercase.", "How does {w} look in lower case?", "In small letters: {w}", "Lowercase {w}.", "To lower case: {w}", "Use small letters for {w}.", "I want {w} in lower case.", "Spell {w} with small letters only.",
         "Write {w} in lower case.", "Write {w} in small letters.", "Put {w} in lowercase.", "Make {w} lowercase.",
         "Convert {w} to lower case.", "Lowercase: {w}", "Turn {w} into small letters.", "What is {w} in lower case?"),
        ("Please write {w} in lowercase.", "Change {w} to lower case."),
    ),
    "spell": (
        ("How is {w} spelled?", "Which letters are in {w}?", "Give me the letters of {w}.", "Write {w} letter by letter.", "Tell me how to spell {w}.", "What is the spelling of {w}?", "Spelling of {w}, please.", "I want you to spell {w}.", "Letters of {w}?",
         "Spell the word {w}.", "Spell {w}.", "How do you spell {w}?", "Please spell {w}.", "Spell {w} letter by letter."),
        ("Can you spell {w}?",),
    ),
    "repeat": (
        ("Can you say this: {w}", "Could you repeat: {w}",
         "Say this again: {w}", "Repeat the following: {w}", "Write the same: {w}", "Echo: {w}", "Say after me: {w}", "Please say: {w}", "I say, you repeat: {w}",
         "Repeat after me: {w}", "Say: {w}", "Repeat: {w}", "Please repeat: {w}", "Write this: {w}", "Copy this: {w}"),
        ("Can you repeat this: {w}",),
    ),
    "sort_up": (
        ("In order, please: {w}", "Sort these, please: {w}", "Please put these numbers in order: {w}",
         "Sort the following numbers: {w}", "Sort the list of numbers: {w}", "From smallest to largest: {w}", "In ascending order: {w}", "Bring these numbers into order: {w}", "Numbers in order: {w}", "Rank from low to high: {w}", "Order the numbers {w}", "Sort numbers: {w}", "Sort them: {w}",
         "Sort these numbers: {w}", "Sort {w}", "Sort the list {w}", "Put these numbers in order: {w}",
         "Sort from small to large: {w}", "Sort in ascending order: {w}", "Order these numbers: {w}",
         "Please sort {w}", "Arrange from smallest to largest: {w}"),
        ("Please sort these numbers: {w}", "Sort the numbers {w}"),
    ),
    "sort_down": (
        ("From largest to smallest: {w}", "In descending order: {w}", "Sort these numbers from high to low: {w}", "Sort downwards: {w}", "Order from largest to smallest: {w}", "Sort in reverse: {w}", "Largest first: {w}", "Rank from high to low: {w}",
         "Sort from large to small: {w}", "Sort in descending order: {w}", "Sort these numbers, largest first: {w}",
         "Arrange from largest to smallest: {w}", "Sort {w} in descending order"),
        ("Sort these from largest to smallest: {w}",),
    ),
    "sort_words": (
        ("Alphabetically, please: {w}", "Sort by alphabet, please: {w}", "These words in order, please: {w}", "Sort these, please: {w}", "Alphabetical order of these words: {w}", "Put in alphabetical order: {w}",
         "In alphabetical order: {w}", "Sort the words: {w}", "Sort the following words: {w}", "Words in alphabetical order: {w}", "Sort by alphabet: {w}", "Bring these words into alphabetical order: {w}", "Alphabetical: {w}", "Order the words alphabetically: {w}", "Sort from a to z: {w}", "What is the alphabetical order of {w}?",
         "Sort these words: {w}", "Sort these words alphabetically: {w}", "Put these words in alphabetical order: {w}",
         "Sort alphabetically: {w}", "Order these words by alphabet: {w}", "Arrange alphabetically: {w}"),
        ("Please sort these words: {w}", "Alphabetical order, please: {w}"),
    ),
    "largest": (
        ("Which of these is the largest: {w}", "The largest of {w}?", "Tell me the largest number: {w}", "Pick the largest: {w}", "Largest number in {w}?",
         "What is the largest of {w}?", "Which is the largest number: {w}", "Find the largest number in {w}",
         "What is the maximum of {w}?"),
        ("Which number is the largest: {w}",),
    ),
    "next": (
        ("After {w} comes which {kind}?", "What {kind} is after {w}?", "The {kind} after {w} is?", "Which is the {kind} after {w}?", "Tell me the {kind} after {w}.", "What is the {kind} that follows {w}?",
         "What comes after {w}?", "What {kind} comes after {w}?", "Which {kind} follows {w}?", "What is the {kind} after {w}?",
         "Name the {kind} after {w}.", "Which {kind} comes after {w}?"),
        ("What {kind} follows {w}?", "What is the next {kind} after {w}?"),
    ),
    "previous": (
        ("Before {w} comes which {kind}?", "What {kind} is before {w}?", "The {kind} before {w} is?", "Tell me the {kind} before {w}.", "Which {kind} precedes {w}?",
         "What comes before {w}?", "What {kind} comes before {w}?", "What is the {kind} before {w}?",
         "Which {kind} is before {w}?", "Name the {kind} before {w}."),
        ("Which {kind} comes before {w}?",),
    ),
    "days_later": (
        ("Starting from {w}, which day is it after {n} days?", "It is {w} today. What day is in {n} days?", "{n} days after {w} is which day?", "Today is {w}. Which day is it {n} days later?", "When it is {w}, what day is it {n} days later?",
         "What day is {n} days after {w}?", "Today is {w}. What day is it in {n} days?", "If today is {w}, what day is in {n} days?",
         "Which day is {n} days after {w}?"),
        ("It is {w}. What day will it be in {n} days?",),
    ),
    "nth_of": (
        ("What {kind} is the {n} of the {whole}?", "The {n} {kind} of the {whole} is?", "Which one is the {n} {kind} of the {whole}?", "What is the {n} {kind} in a {whole}?",
         "What is the {n} {kind} of the {whole}?", "Which {kind} is the {n} of the {whole}?",
         "Name the {n} {kind} of the {whole}.", "Tell me the {n} {kind} of the {whole}."),
        ("Which is the {n} {kind} of the {whole}?",),
    ),
    "month_days": (
        ("{w} has how many days?", "How many days are there in {w}?", "Tell me how many days {w} has.", "What is the number of days in {w}?",
         "How many days does {w} have?", "How many days are in {w}?", "How long is {w} in days?", "Number of days in {w}?"),
        ("How many days has {w}?",),
    ),
    "convert": (
        ("How many {b} do {n} {a} make?", "{n} {a} are how many {b}?", "{n} {a} to {b}", "{n} {a} = ? {b}", "Tell me {n} {a} in {b}.", "{n} {a} make how many {b}?", "Give me {n} {a} in {b}.", "What do {n} {a} make in {b}?", "I have {n} {a}. How many {b} is that?", "Turn {n} {a} into {b}.",
         "Convert {n} {a} to {b}.", "How many {b} are {n} {a}?", "What is {n} {a} in {b}?", "{n} {a} in {b}?",
         "How many {b} are in {n} {a}?", "Please convert {n} {a} to {b}.", "Change {n} {a} to {b}.",
         "Express {n} {a} in {b}.", "{n} {a} is how many {b}?"),
        ("How many {b} is {n} {a}?", "What are {n} {a} in {b}?"),
    ),
}
