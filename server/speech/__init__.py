"""Speech to text: what stands between the transcription routes and a model that hears."""
