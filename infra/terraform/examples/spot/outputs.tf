output "url" {
  description = "Where clients call."
  value       = module.gateway.url
}

output "profile" {
  description = "Makes the profile of this cluster for the `sllm` command."
  value       = module.gateway.profile
}

output "balancer_dns_name" {
  description = "What the host is an alias of."
  value       = module.gateway.balancer_dns_name
}
