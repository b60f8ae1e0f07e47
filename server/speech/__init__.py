"""Speech to text: the steps between the transcription routes and a model that takes audio."""
