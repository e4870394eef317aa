output "url" {
  description = "The servers, as SLLM_NATS_URL takes them."
  value       = join(",", [for server in keys(local.servers) : "tls://${server}.${var.domain}:4222"])
}

output "names" {
  description = "Names that the servers' certificate must be for."
  value       = [for server in keys(local.servers) : "${server}.${var.domain}"]
}
