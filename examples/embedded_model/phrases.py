"""How questions are put: for each kind, the phrasings of training and those kept for the held-out set."""

LEADS = (
    "Please answer:", "Question:", "Hello!", "Hi.", "Hey,", "Tell me:", "Quick question:", "Please:", "OK,",
    "One question:", "Good morning!", "So,", "Now,", "Look:", "I wonder:", "Help me:",
)  # fmt: skip
ASIDES = ("Thanks!", "Please.", "Thank you.", "Answer briefly.", "Be brief.", "Just the answer.", "Keep it short.")
SYSTEMS = (
    "You are a helpful assistant.", "You are a small model that sees, hears and reads.", "Answer briefly.",
    "You are omniloop, a small assistant.", "Be short and precise.", "You are a friendly assistant.",
    "Answer the question of the user.", "You help people.",
)  # fmt: skip

# name: (training, held out)
PHRASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # pictures: one object
    "describe": (
        ("What is in the picture?", "What is in this image?", "Describe the picture.", "Describe this image.",
         "What do you see?", "What does the image show?", "What is shown here?", "What can you see in this picture?",
         "Tell me what is in the picture.", "What's in this image?", "Describe what you see.", "What is this?",
         "Please describe the image.", "What is in the photo?", "What does this picture show?", "What is here?"),
        ("What is visible in the image?", "What can be seen here?", "Say what the picture shows.",
         "What's in the picture?"),
    ),
    "shape": (
        ("What shape is this?", "What shape is in the picture?", "Which shape do you see?", "Name the shape.",
         "What is the shape?", "Which shape is shown?", "What shape do you see in the image?",
         "Tell me the shape.", "What shape is it?", "What kind of shape is in the image?"),
        ("Which shape is in the image?", "What shape can you see?"),
    ),
    "colour": (
        ("What color is it?", "What colour is it?", "What color is the shape?", "What colour is the shape?",
         "Which color does the shape have?", "Name the color of the shape.", "What is the color of the object?",
         "What color is the object?", "What colour is the object in the picture?", "Tell me the color.",
         "What is its color?", "Which color is the shape?"),
        ("Which colour does the object have?", "What is the color of the shape?"),
    ),
    "background": (
        ("What color is the background?", "What colour is the background?", "Which color is the background?",
         "What is the background color?", "Name the color of the background.", "What color is behind the shapes?",
         "Tell me the background color.", "On what color is it drawn?", "What is the color of the background?"),
        ("What is the colour of the background?", "Which colour does the background have?"),
    ),
    # pictures: many objects
    "count": (
        ("How many {what} are there?", "How many {what} do you see?", "Count the {what}.",
         "How many {what} are in the picture?", "What is the number of {what}?", "How many {what} are shown?",
         "Tell me how many {what} there are.", "How many {what} can you see?", "Number of {what}?",
         "How many {what} does the image show?", "Please count the {what}.", "How many {what}?"),
        ("How many {what} are in this image?", "How many {what} can you count?"),
    ),
    "exists": (
        ("Is there a {what}?", "Is there a {what} in the picture?", "Do you see a {what}?", "Can you see a {what}?",
         "Does the picture show a {what}?", "Does the image contain a {what}?", "Is a {what} in the image?"),
        ("Is there a {what} in this image?", "Does the image show a {what}?"),
    ),
    "colour_of": (
        ("What color is the {what}?", "What colour is the {what}?", "Which color does the {what} have?",
         "What is the color of the {what}?", "Name the color of the {what}.", "Tell me the color of the {what}.",
         "The {what} has which color?"),
        ("Which colour is the {what}?", "What is the colour of the {what}?"),
    ),
    "shape_of": (
        ("What shape is {what}?", "Which shape is {what}?", "What is the {what} shape?", "Name the {what} shape.",
         "What shape is the {what} object?", "Which object is {what}?", "What kind of shape is {what}?"),
        ("Which shape is the {what} one?", "What is the shape of the {what} object?"),
    ),
    "relation": (
        ("Is the {a} {rel} the {b}?", "Is the {a} {rel} the {b} in the picture?", "Would you say the {a} is {rel} the {b}?",
         "Do you see the {a} {rel} the {b}?", "Look at the picture: is the {a} {rel} the {b}?",
         "True or not: the {a} is {rel} the {b}. Answer yes or no.", "Yes or no: is the {a} {rel} the {b}?"),
        ("In this image, is the {a} {rel} the {b}?", "Is it right that the {a} is {rel} the {b}?"),
    ),
    "where": (
        ("Where is the {a}, seen from the {b}: left, right, above or below?", "Where is the {a} relative to the {b}?",
         "Is the {a} left, right, above or below the {b}?", "On which side of the {b} is the {a}?",
         "Where is the {a} compared to the {b}?", "In which direction from the {b} is the {a}?"),
        ("Where do you see the {a} relative to the {b}?", "Relative to the {b}, where is the {a}?"),
    ),
    "extreme": (
        ("Which object is {side}?", "Which shape is {side}?", "What is {side}?", "Name the shape {side}.",
         "Which one is {side}?", "What do you see {side}?", "Tell me which object is {side}."),
        ("What object is {side}?", "Which of the shapes is {side}?"),
    ),
    "bigger": (
        ("Which is {size}, the {a} or the {b}?", "Which one is {size}: the {a} or the {b}?",
         "What is {size}, the {a} or the {b}?", "Is the {a} or the {b} {size}?",
         "Which shape is {size}, the {a} or the {b}?", "Of the {a} and the {b}, which is {size}?"),
        ("Which object is {size}, the {a} or the {b}?", "The {a} or the {b}: which is {size}?"),
    ),
    # several pictures
    "which_picture": (
        ("Which picture shows a {what}?", "Which of the pictures shows a {what}?", "In which picture is a {what}?",
         "Which image has a {what}?", "Which of the images shows a {what}?", "Where is the {what}, in which picture?",
         "Which picture contains a {what}?", "Find the picture with a {what}."),
        ("Which image contains a {what}?", "In which of the pictures do you see a {what}?"),
    ),
    "more_objects": (
        ("Which picture has {more} shapes?", "Which of the two pictures has {more} shapes?",
         "Which image shows {more} objects?", "Which of the two images has {more} objects?",
         "In which picture are there {more} shapes?", "Which one has {more} shapes?"),
        ("Which of the two pictures shows {more} shapes?", "Which image has {more} objects?"),
    ),
    "same": (
        ("Do both pictures show the same {what}?", "Is the {what} the same in both pictures?",
         "Do the two images have the same {what}?", "Are the two {what}s the same?", "Same {what} in both pictures?",
         "Compare the two pictures: is the {what} the same?"),
        ("Do the two pictures show the same {what}?", "Is it the same {what} in both images?"),
    ),
    "nth_picture": (
        ("What is in the {nth} picture?", "What does the {nth} picture show?", "Describe the {nth} picture.",
         "What is in the {nth} image?", "What do you see in the {nth} image?", "Describe the {nth} image."),
        ("What does the {nth} image show?", "What do you see in the {nth} picture?"),
    ),
    # print
    "read": (
        ("What does it say?", "What is written here?", "Read the text.", "What word is this?", "Read the word.",
         "What does the sign say?", "What is the text in the picture?", "What text is in the image?",
         "Which word do you see?", "What is printed in the picture?", "Please read this.", "What is written?",
         "Read what is in the image.", "What does the picture say?", "Read this."),
        ("What is the word in the picture?", "What is written in the image?", "What does the text say?"),
    ),
    "read_number": (
        ("What number is this?", "Read the number.", "Which number do you see?", "What is the number?",
         "What number is written here?", "What number is in the picture?", "What number is printed here?",
         "Tell me the number.", "What does it say?", "Read this.", "What is written here?"),
        ("Which number is in the picture?", "What is the number in the image?"),
    ),
    # sound
    "hear": (
        ("What do you hear?", "What is in the recording?", "What is this sound?", "Describe the sound.",
         "What can you hear?", "Listen. What is it?", "What is in the audio?", "Describe the audio.",
         "What does the recording contain?", "What sound is this?"),
        ("What can be heard?", "What do you hear in the recording?"),
    ),
    "digits": (
        ("Which digits do you hear?", "What digits are spoken?", "Write down the digits.", "What number is spoken?",
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
        ("Which word do you hear?", "What word is spoken?", "What is the spoken word?", "What command is this?",
         "Which word is said?", "Write the word that you hear.", "What does the voice say?", "Transcribe the word.",
         "Which command do you hear?", "What is said?", "Transcribe the recording.", "Transcribe this.",
         "What word does the speaker say?", "What does the speaker say?", "What is the command?"),
        ("What word do you hear?", "Which word is spoken?", "Which command is spoken?"),
    ),
    "tone": (
        ("Is the tone rising or falling?", "Does the tone rise or fall?", "Does the pitch go up or down?",
         "Is the pitch rising or falling?", "Which way does the tone go, rising or falling?",
         "Is the sound rising or falling?", "Rising or falling?"),
        ("Is this tone rising or falling?", "Would you call the tone rising or falling?"),
    ),
    "beeps": (
        ("How many beeps do you hear?", "Count the beeps.", "How many beeps are there?", "What is the number of beeps?",
         "How many tones do you hear?", "How many times does it beep?", "Number of beeps?",
         "How many beeps are in the recording?"),
        ("How many beeps can you hear?", "How many beeps are in the audio?"),
    ),
    "length": (
        ("Are the beeps long or short?", "Is it a long or a short beep?", "Are the tones long or short?",
         "Is the sound long or short?", "Long or short beeps?", "Would you call the beeps long or short?"),
        ("Do you hear long or short beeps?", "Are these beeps long or short?"),
    ),
    # film
    "describe_film": (
        ("What happens in the video?", "Describe the video.", "What do you see in the video?", "What happens?",
         "Describe the clip.", "What is going on in the video?", "What happens in this clip?",
         "Tell me what happens in the video.", "What does the video show?", "What is in the video?"),
        ("What happens in this video?", "Describe what happens.", "What does the clip show?"),
    ),
    "direction": (
        ("Which way does the {what} move?", "In which direction does the {what} move?", "Where does the {what} go?",
         "In what direction is the {what} moving?", "Does the {what} move left, right, up or down?",
         "Which direction is the {what} going?", "Where is the {what} moving?", "The {what} moves in which direction?"),
        ("What direction does the {what} move in?", "Which way is the {what} moving?"),
    ),
    "moves": (
        ("What moves?", "What is moving?", "Which object moves?", "Which shape is moving?", "What moves in the video?",
         "Which object is moving in the video?", "Which shape moves?", "Name the moving object."),
        ("Which of the objects moves?", "What is moving in the video?"),
    ),
    "changes": (
        ("What changes color?", "Which object changes its color?", "What changes colour?", "Which shape changes color?",
         "What is it that changes color?", "Which object changes colour in the video?"),
        ("Which of the shapes changes color?", "Which object changes color?"),
    ),
    "turns": (
        ("What color does the {what} turn?", "Which color does the {what} become?", "What colour does the {what} turn to?",
         "What is the color of the {what} at the end?", "Into which color does the {what} change?"),
        ("What colour does the {what} become?",),
    ),
    "first": (
        ("What appears first?", "Which object appears first?", "Which shape appears first?", "What comes first?",
         "Which one appears first?", "What is the first shape to appear?", "What shows up first?"),
        ("Which of the shapes appears first?", "What is the first object to appear?"),
    ),
    # text
    "sum": (
        ("What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} = ?", "What is {a} plus {b}?", "Add {a} and {b}.",
         "Calculate {a} + {b}.", "How much is {a} + {b}?", "How much is {a} plus {b}?", "Compute {a} + {b}.",
         "What is the sum of {a} and {b}?", "{a}+{b}=", "What do you get when you add {a} and {b}?", "Solve {a} + {b}."),
        ("What's {a} + {b}?", "Please add {a} and {b}.", "What does {a} + {b} make?"),
    ),
    "difference": (
        ("What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} = ?", "What is {a} minus {b}?",
         "Subtract {b} from {a}.", "Calculate {a} - {b}.", "How much is {a} - {b}?", "How much is {a} minus {b}?",
         "Compute {a} - {b}.", "{a}-{b}=", "Take {b} away from {a}.", "Solve {a} - {b}."),
        ("What's {a} - {b}?", "Please subtract {b} from {a}.", "What does {a} - {b} make?"),
    ),
    "product": (
        ("What is {a} * {b}?", "{a} * {b}", "{a}*{b}", "{a} x {b}", "What is {a} times {b}?", "Multiply {a} by {b}.",
         "Calculate {a} * {b}.", "How much is {a} times {b}?", "Compute {a} x {b}.", "{a} * {b} = ?",
         "What is the product of {a} and {b}?", "What is {a} x {b}?"),
        ("What's {a} * {b}?", "Please multiply {a} by {b}.", "What does {a} times {b} make?"),
    ),
    "quotient": (
        ("What is {a} / {b}?", "{a} / {b}", "{a}/{b}", "What is {a} divided by {b}?", "Divide {a} by {b}.",
         "Calculate {a} / {b}.", "How much is {a} divided by {b}?", "{a} / {b} = ?", "Compute {a} / {b}."),
        ("What's {a} / {b}?", "Please divide {a} by {b}."),
    ),
    "larger": (
        ("Which is larger, {a} or {b}?", "Which number is bigger: {a} or {b}?", "What is larger, {a} or {b}?",
         "Is {a} or {b} the larger number?", "Which is greater, {a} or {b}?"),
        ("Which one is larger: {a} or {b}?",),
    ),
    "count_up": (
        ("Count from {a} to {b}.", "Please count from {a} to {b}.", "Count up from {a} to {b}.",
         "List the numbers from {a} to {b}.", "Write the numbers from {a} to {b}.", "Can you count from {a} to {b}?"),
        ("Give me the numbers from {a} to {b}.", "Could you count from {a} to {b}?"),
    ),
    "count_down": (
        ("Count down from {a} to {b}.", "Count backwards from {a} to {b}.", "Please count down from {a} to {b}.",
         "Can you count backwards from {a} to {b}?"),
        ("Count back from {a} to {b}.",),
    ),
    "letters": (
        ("How many letters are in the word {w}?", "How many letters does the word {w} have?", "How many letters has {w}?",
         "Count the letters of {w}.", "How many letters are in {w}?", "How long is the word {w}?"),
        ("How many letters does {w} have?",),
    ),
    "num_words": (
        ("How many words are in this sentence: {w}", "Count the words: {w}", "How many words: {w}",
         "How many words does this sentence have? {w}"),
        ("How many words are in the sentence: {w}",),
    ),
    "reverse": (
        ("Reverse the word {w}.", "Write {w} backwards.", "Spell {w} backwards.", "Reverse {w}.", "Turn {w} around.",
         "What is {w} backwards?", "What is {w} spelled backwards?", "Please reverse the word {w}.",
         "Write the word {w} in reverse."),
        ("Can you write {w} backwards?", "Give me {w} in reverse."),
    ),
    "reverse_list": (
        ("Reverse this list: {w}", "Reverse the list {w}", "Put this list in reverse order: {w}",
         "Write this list backwards: {w}", "Turn the list around: {w}"),
        ("Please reverse the following list: {w}",),
    ),
    "upper": (
        ("Write {w} in upper case.", "Write {w} in capital letters.", "Put {w} in uppercase.", "Make {w} uppercase.",
         "Convert {w} to upper case.", "What is {w} in capitals?", "Uppercase: {w}", "Capitalize every letter of {w}.",
         "Turn {w} into capital letters."),
        ("Please write {w} in capitals.", "Change {w} to upper case."),
    ),
    "lower": (
        ("Write {w} in lower case.", "Write {w} in small letters.", "Put {w} in lowercase.", "Make {w} lowercase.",
         "Convert {w} to lower case.", "Lowercase: {w}", "Turn {w} into small letters.", "What is {w} in lower case?"),
        ("Please write {w} in lowercase.", "Change {w} to lower case."),
    ),
    "spell": (
        ("Spell the word {w}.", "Spell {w}.", "How do you spell {w}?", "Please spell {w}.", "Spell {w} letter by letter."),
        ("Can you spell {w}?",),
    ),
    "repeat": (
        ("Repeat after me: {w}", "Say: {w}", "Repeat: {w}", "Please repeat: {w}", "Write this: {w}", "Copy this: {w}"),
        ("Can you repeat this: {w}",),
    ),
    "sort_up": (
        ("Sort these numbers: {w}", "Sort {w}", "Sort the list {w}", "Put these numbers in order: {w}",
         "Sort from small to large: {w}", "Sort in ascending order: {w}", "Order these numbers: {w}",
         "Please sort {w}", "Arrange from smallest to largest: {w}"),
        ("Please sort these numbers: {w}", "Sort the numbers {w}"),
    ),
    "sort_down": (
        ("Sort from large to small: {w}", "Sort in descending order: {w}", "Sort these numbers, largest first: {w}",
         "Arrange from largest to smallest: {w}", "Sort {w} in descending order"),
        ("Sort these from largest to smallest: {w}",),
    ),
    "sort_words": (
        ("Sort these words: {w}", "Sort these words alphabetically: {w}", "Put these words in alphabetical order: {w}",
         "Sort alphabetically: {w}", "Order these words by alphabet: {w}", "Arrange alphabetically: {w}"),
        ("Please sort these words: {w}", "Alphabetical order, please: {w}"),
    ),
    "largest": (
        ("What is the largest of {w}?", "Which is the largest number: {w}", "Find the largest number in {w}",
         "What is the maximum of {w}?"),
        ("Which number is the largest: {w}",),
    ),
    "next": (
        ("What comes after {w}?", "What {kind} comes after {w}?", "Which {kind} follows {w}?", "What is the {kind} after {w}?",
         "Name the {kind} after {w}.", "Which {kind} comes after {w}?"),
        ("What {kind} follows {w}?", "What is the next {kind} after {w}?"),
    ),
    "previous": (
        ("What comes before {w}?", "What {kind} comes before {w}?", "What is the {kind} before {w}?",
         "Which {kind} is before {w}?", "Name the {kind} before {w}."),
        ("Which {kind} comes before {w}?",),
    ),
    "days_later": (
        ("What day is {n} days after {w}?", "Today is {w}. What day is it in {n} days?", "If today is {w}, what day is in {n} days?",
         "Which day is {n} days after {w}?"),
        ("It is {w}. What day will it be in {n} days?",),
    ),
    "nth_of": (
        ("What is the {n} {kind} of the {whole}?", "Which {kind} is the {n} of the {whole}?",
         "Name the {n} {kind} of the {whole}.", "Tell me the {n} {kind} of the {whole}."),
        ("Which is the {n} {kind} of the {whole}?",),
    ),
    "month_days": (
        ("How many days does {w} have?", "How many days are in {w}?", "How long is {w} in days?", "Number of days in {w}?"),
        ("How many days has {w}?",),
    ),
    "convert": (
        ("Convert {n} {a} to {b}.", "How many {b} are {n} {a}?", "What is {n} {a} in {b}?", "{n} {a} in {b}?",
         "How many {b} are in {n} {a}?", "Please convert {n} {a} to {b}.", "Change {n} {a} to {b}.",
         "Express {n} {a} in {b}.", "{n} {a} is how many {b}?"),
        ("How many {b} is {n} {a}?", "What are {n} {a} in {b}?"),
    ),
}
