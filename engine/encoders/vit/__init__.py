"""The plain vision transformer that many families share (CLIP, SigLIP, InternViT, Pixtral), and what follows it."""
