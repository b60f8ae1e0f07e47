"""SageMaker's route: /invocations takes the body of any of our routes. /ping is the other half of that protocol."""
