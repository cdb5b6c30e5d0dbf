"""OpenAI's protocol of responses: /v1/responses."""
