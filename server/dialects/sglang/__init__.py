"""SGLang's own routes: /generate, and those that its clients and trainers call to steer a server."""
